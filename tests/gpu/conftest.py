"""What a GPU library opens once for the process is not what a test leaves behind."""

from __future__ import annotations

import contextlib

import pytest

from kvwire.errors import BackendUnavailable
from kvwire.memory.device.cupy_ops import CupyOps
from kvwire.memory.device.ops import DeviceOps
from kvwire.memory.device.torch_ops import TorchOps


@pytest.fixture(scope="session", autouse=True)
def _libraries_are_started() -> None:
    """Start each library before the first test looks at what is open."""
    for make in (TorchOps, CupyOps):
        with contextlib.suppress(BackendUnavailable):
            _start(make(0))


def _start(ops: DeviceOps) -> None:
    stream = ops.stream()
    stream.to_host(stream.buffer(4096), ops.pinned(4096))
    stream.record().synchronize()
    stream.close()
