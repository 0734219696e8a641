"""The devices of this process, each made when it is first used."""

from __future__ import annotations

import threading
from typing import Final

from kvwire.errors import UsageError
from kvwire.memory.device.ops import DeviceOps, library_event_index
from kvwire.types import Device, MemoryKind


def device_ops(device: Device) -> DeviceOps:
    """Return the operations of a device, created on first use and kept.

    Raises:
        BackendUnavailable: There is no such device here.
        UsageError: It is a simulated device that is not registered.
    """
    with _lock:
        found = _known.get(device)
        if found is None:
            if device.kind is not MemoryKind.CUDA:
                raise UsageError(f"device {device} does not exist, or was closed")
            # Most processes use no GPU.
            from kvwire.memory.device.cuda_ops import CudaOps  # noqa: PLC0415

            found = _known[device] = CudaOps(device.index)
        return found


def event_ops(event: object) -> DeviceOps | None:
    """Return the operations of an event's device, or None if it is not an event."""
    with _lock:
        known = list(_known.values())
    for ops in known:
        if ops.owns(event):
            return ops
    index = library_event_index(event)
    return None if index is None else device_ops(Device(MemoryKind.CUDA, max(index, 0)))


def register(ops: DeviceOps) -> None:
    """Register a device that is not detected, such as a test's device."""
    with _lock:
        _known[ops.device] = ops


def unregister(ops: DeviceOps) -> None:
    """Unregister a device."""
    with _lock:
        _known.pop(ops.device, None)


_lock: Final = threading.Lock()
_known: Final[dict[Device, DeviceOps]] = {}
