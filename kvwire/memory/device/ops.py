"""What kvwire needs of a device: streams of work, events, pinned host memory, copies.

NVIDIA's driver has it (:mod:`kvwire.memory.device.cuda_ops`). Tests register another
device, whose streams are threads.

The rules are CUDA's. A stream does its work in order, beside the host; every method of
a stream only queues. Memory that queued work touches stays alive and unchanged until an
event recorded behind it has fired: that is the caller's business, here and there. The
device as a whole is never waited for.

Memory of a device is always given as :class:`~kvwire.kv.fragments.Fragments`, since
addresses and lengths are all that is known of it; contiguous memory is one fragment.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, Final

import numpy as np

from kvwire.errors import BackendUnavailable, KVWireError, UsageError
from kvwire.kv.fragments import Fragments
from kvwire.types import Device, MemoryKind


class Event(ABC):
    """Marks a point in a stream's work."""

    @abstractmethod
    def query(self) -> bool:
        """Tell whether everything before it is done. Never blocks."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything before it is done, asleep and without the GIL."""


class Stream(ABC):
    """Queues a device's work, which happens in that order."""

    @property
    @abstractmethod
    def pointer(self) -> int:
        """Return the driver's handle, such as a ``CUstream``; 0 for none."""

    @abstractmethod
    def wait(self, event: object) -> None:
        """Have what is queued from here on wait for an event, ours or a library's."""

    @abstractmethod
    def record(self) -> Event:
        """Record an event that fires when all that is queued so far is done."""

    @abstractmethod
    def buffer(self, nbytes: int) -> Fragments:
        """Make contiguous device memory, freed with its last reference."""

    @abstractmethod
    def gather(self, source: Fragments, into: Fragments) -> None:
        """Copy many fragments into one, on the device."""

    @abstractmethod
    def scatter(self, source: Fragments, into: Fragments) -> None:
        """Copy one fragment into many, on the device."""

    @abstractmethod
    def to_host(self, source: Fragments, into: memoryview) -> None:
        """Copy fragments into pinned memory, one copy for each of them."""

    @abstractmethod
    def to_device(self, source: memoryview, into: Fragments) -> None:
        """Copy pinned memory into fragments, one copy for each of them."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the stream once its work is done; never blocks."""


class DeviceOps(ABC):
    """Works with one device."""

    device: Device

    @abstractmethod
    def stream(self) -> Stream:
        """Make a stream that no other stream waits for."""

    @abstractmethod
    def record_current(self) -> Event:
        """Record an event behind the calling thread's queued work.

        On the stream that the library calls current in this thread: so from between the
        kernels of an application, and never on its behalf from another thread.
        """

    @abstractmethod
    def pinned(self, nbytes: int) -> memoryview:
        """Return the host memory that the device copies from and to by itself."""

    @abstractmethod
    def owns(self, event: object) -> bool:
        """Tell whether an event is one of this device's."""


def device_ops(device: Device) -> DeviceOps:
    """Return the ops of a device, made on first use and kept.

    Raises:
        BackendUnavailable: There is no such device here.
    """
    with _lock:
        found = _known.get(device)
        if found is None:
            if device.kind is not MemoryKind.CUDA:
                raise UsageError(f"device {device}: there is none, or it was closed")
            # Imported on demand, since it imports this module.
            from kvwire.memory.device.cuda_ops import CudaOps  # noqa: PLC0415

            found = _known[device] = CudaOps(device.index)
        return found


def event_ops(event: object) -> DeviceOps | None:
    """Return the ops of an event's device; None if it is no device's event."""
    with _lock:
        known = list(_known.values())
    for ops in known:
        if ops.owns(event):
            return ops
    index = library_event_index(event)
    return None if index is None else device_ops(Device(MemoryKind.CUDA, max(index, 0)))


def library_event_index(event: object) -> int | None:
    """Return the GPU of an event of torch or CuPy.

    -1 if it does not say, since any stream may wait for it; None for what is no event.
    """
    if type(event).__module__.partition(".")[0] not in ("torch", "cupy"):
        return None
    if not hasattr(event, "synchronize") or hasattr(event, "wait_event"):
        return None  # what waits for events is a stream
    device = getattr(event, "device", None)
    index = getattr(device, "index", getattr(event, "device_id", None))
    return index if isinstance(index, int) else -1


def register(ops: DeviceOps) -> None:
    """Make a device known; used by those that are not found by themselves."""
    with _lock:
        _known[ops.device] = ops


def unregister(ops: DeviceOps) -> None:
    """Forget a device."""
    with _lock:
        _known.pop(ops.device, None)


class device_errors:  # noqa: N801 - a statement's word, as in contextlib
    """Raises what the library raises of a device that does not work as ours.

    No generator of ``contextlib``, for the reason at :class:`kvwire.extras.needed_by`.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def __enter__(self) -> None:
        """Do nothing: what fails is found within."""

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        if isinstance(exc, Exception) and not isinstance(exc, KVWireError):
            raise BackendUnavailable(f"{self._device} does not work: {exc}") from exc


def contiguous(address: int, nbytes: int, owner: object, device: Device) -> Fragments:
    """Device memory in one piece."""
    return Fragments(
        np.array([address], np.uint64),
        np.array([nbytes], np.uint64),
        owner=owner,
        writable=True,
        device=device,
    )


class DeviceArray:
    """Shows device memory at an address, as libraries take it without a copy.

    Whoever uses it keeps the memory's owner, and sees to the order of streams.
    """

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }


_lock: Final = threading.Lock()
_known: Final[dict[Device, DeviceOps]] = {}
