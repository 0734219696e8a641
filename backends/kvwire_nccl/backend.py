"""The entry point of the backend ``nccl``: lanes for GPU memory."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import ClassVar, Final

from kvwire.backend import (
    Availability,
    Backend,
    Capabilities,
    Finding,
)
from kvwire.backend.lane import Lane, LaneContext
from kvwire.extras import install_command
from kvwire.types import MemoryKind
from kvwire_nccl.lane import NcclLane
from kvwire_nccl.nccl import DEVICE, MOVE, START, Nccl

# After every transport for host memory, so it is used only on request. Two processes on
# one GPU cannot use it, and its kernels share the GPU with the model's.
_RANK = 90


class NcclBackend(Backend):
    """Moves GPU memory over NCCL, beside another transport's control link.

    Each lane has its own library object, made from its connection's settings.
    """

    scheme: ClassVar[str] = "nccl"
    capabilities: ClassVar[Capabilities] = Capabilities(
        links=False, lanes=True, memory_kinds=frozenset({MemoryKind.CUDA})
    )
    settings: ClassVar = {DEVICE: (), START: (), MOVE: ()}

    @classmethod
    def rank(cls) -> int:
        return _RANK

    @classmethod
    def availability(cls) -> Availability:
        """Return whether NCCL can run here, without loading it."""
        missing = next((why for there, why in _NEEDS if not there()), "")
        if missing:
            return Availability(available=False, reason=missing, remedy=_remedy())
        return Availability(
            available=True, reason="nccl4py is installed and the kernel has a GPU"
        )

    @classmethod
    def diagnose(cls) -> tuple[Finding, ...]:
        return tuple(
            Finding(name=name, state="ok", text="there is one")
            if there()
            else Finding(name=name, state="missing", text=why, remedy=_remedy())
            for name, (there, why) in zip(("GPU", "nccl4py"), _NEEDS, strict=True)
        )

    def open_lane(self, context: LaneContext) -> Lane:
        return NcclLane(context, Nccl(context.settings))


def _has_nccl4py() -> bool:
    return importlib.util.find_spec("nccl") is not None


def _remedy() -> str:
    return f"{install_command('nccl')}, and torch or CuPy, on a machine with a GPU"


_DRIVER: Final = Path("/proc/driver/nvidia/version")
_NEEDS = (
    (_DRIVER.exists, "this machine has no NVIDIA GPU, and nccl moves GPU memory only"),
    (_has_nccl4py, "nccl4py is not installed"),
)
