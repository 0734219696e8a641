"""What moves the bytes of a lane: NCCL, or what tests put in its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

from kvwire.errors import UsageError
from kvwire.types import MemoryKind
from kvwire_nccl.pipe import Pipe

# NCCL's first communicator of a process loads kernels and looks for networks: seconds.
_START_TIMEOUT_S: Final = 20.0
# Nothing moves for so long only where the peer is gone, and that is known earlier.
_MOVE_TIMEOUT_S: Final = 30.0


class CollectiveLibrary(ABC):
    """Wraps a library that makes the directions of lanes.

    Attributes:
        version: Its name and version, which must be the same on both sides.
        kinds: Memory that it moves.
        start_timeout_s: How long a direction may take to come up.
        move_timeout_s: How long it may take until the next payload under way is done.
    """

    version: str
    kinds: frozenset[MemoryKind]
    start_timeout_s: float = _START_TIMEOUT_S
    move_timeout_s: float = _MOVE_TIMEOUT_S

    @abstractmethod
    def name(self) -> bytes:
        """Return a new name of a direction; both sides open it with it.

        Raises:
            BackendUnavailable: The library does not work here.
        """

    @abstractmethod
    def open(self, name: bytes, sends: bool) -> Pipe:
        """Open one end of the named direction; await nothing yet.

        Raises:
            BackendUnavailable: It cannot be.
        """

    def close(self) -> None:
        """Let go of what names were made with; every direction has ended."""
        return


START: Final = "start_timeout_s"
MOVE: Final = "move_timeout_s"


def chosen(settings: Mapping[str, str]) -> CollectiveLibrary:
    """Return the library that a user's settings ask for.

    ``device``: the number of the GPU; ``start_timeout_s`` and ``move_timeout_s``:
    seconds.

    Raises:
        BackendUnavailable: It does not work here.
        UsageError: A setting is no number.
    """
    from kvwire_nccl.nccl import Nccl  # noqa: PLC0415 - loads CUDA

    library = Nccl(int(_number("device", settings.get("device", "0"))))
    library.start_timeout_s = _number(START, settings.get(START, "20"))
    library.move_timeout_s = _number(MOVE, settings.get(MOVE, "30"))
    return library


def _number(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 86_400:
        raise UsageError(f"backends.nccl: {key}={text!r} is no number of 0 to 86,400")
    return number
