"""What a GPU library opens once for the process is not what a test leaves behind."""

from __future__ import annotations

import contextlib

import pytest

from kvwire.errors import BackendUnavailable
from kvwire.memory.device.registry import device_ops
from kvwire.types import Device, MemoryKind
from tests.gpu.devices import LIBRARIES


@pytest.fixture(scope="session", autouse=True)
def _libraries_are_started() -> None:
    """Start the driver, and each library, before a test looks at what is open."""
    with contextlib.suppress(BackendUnavailable):
        stream = device_ops(Device(MemoryKind.CUDA, 0)).stream()
        stream.record().synchronize()
        for library in LIBRARIES:
            with contextlib.suppress(ImportError):
                _start(library)


def _start(library: str) -> None:
    if library == "torch":
        import torch

        torch.zeros(1).cuda()
        return
    import cupy

    cupy.zeros(1)
