"""The device operations that kvwire needs: streams, events, pinned memory, copies.

NVIDIA's driver provides them (:mod:`kvwire.memory.device.cuda_ops`). Tests register
another device, whose streams are threads.

The rules are those of CUDA. A stream works in order, concurrently with the host; every
method of a stream only queues work. The caller keeps the memory that queued work
touches alive and unchanged until an event recorded behind it has fired. Nothing waits
for the whole device.

Device memory is always given as :class:`~kvwire.kv.fragments.Fragments`, since only its
addresses and lengths are known; contiguous memory is one fragment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple

import numpy as np

from kvwire.errors import BackendUnavailable, KVWireError
from kvwire.kv.fragments import Fragments
from kvwire.types import Device

HANDLE_BYTES: Final = 64
"""The bytes of a handle with which another process opens an allocation."""


class SharedAllocation(NamedTuple):
    """An allocation of device memory that other processes can open.

    Attributes:
        address: Its first byte, in this process.
        nbytes: Its size.
        handle: HANDLE_BYTES with which another process of this host opens it.
    """

    address: int
    nbytes: int
    handle: bytes


class OpenedAllocation(NamedTuple):
    """Another process's allocation, opened here.

    Attributes:
        address: Its first byte, in this process.
        nbytes: Its size, as this process's driver reports it.
        close: Ends the access. It never raises, and may wait for the device. No queued
            work may still touch the memory.
    """

    address: int
    nbytes: int
    close: Callable[[], object]


class Event(ABC):
    """A point in a stream's work, which has fired once all work before it is done."""

    @property
    @abstractmethod
    def recorded_on(self) -> Hashable:
        """Return a key of its stream: events with equal keys fire in order."""

    @abstractmethod
    def query(self) -> bool:
        """Return whether all work before it is done. Never blocks."""

    @abstractmethod
    def synchronize(self) -> None:
        """Sleep, without the GIL, until all work before it is done."""


class Stream(ABC):
    """A queue of work that a device executes in order."""

    @property
    @abstractmethod
    def pointer(self) -> int:
        """Return the driver's handle, such as a ``CUstream``; 0 for none."""

    @abstractmethod
    def wait(self, event: object) -> None:
        """Make work queued from now on wait for an event, ours or a library's."""

    @abstractmethod
    def record(self) -> Event:
        """Record an event that fires when all work queued so far is done."""

    @abstractmethod
    def buffer(self, nbytes: int) -> Fragments:
        """Allocate contiguous device memory, freed with its last reference."""

    @abstractmethod
    def gather(self, source: Fragments, into: Fragments) -> None:
        """Copy many fragments into one, on the device."""

    @abstractmethod
    def scatter(self, source: Fragments, into: Fragments) -> None:
        """Copy one fragment into many, on the device."""

    @abstractmethod
    def to_host(self, source: Fragments, into: memoryview) -> None:
        """Copy fragments into pinned memory, one copy per fragment."""

    @abstractmethod
    def to_device(self, source: memoryview, into: Fragments) -> None:
        """Copy pinned memory into fragments, one copy per fragment."""

    @abstractmethod
    def close(self) -> None:
        """Release the stream once its work is done; never blocks."""


class DeviceOps(ABC):
    """The operations of one device."""

    device: Device

    @abstractmethod
    def stream(self) -> Stream:
        """Make a stream that no other stream waits for."""

    @abstractmethod
    def record_current(self) -> Event:
        """Record an event behind the work that the calling thread has queued.

        It is recorded on the current stream of the library that the thread uses. So
        call it on the same thread as the application's kernels, after them.
        """

    @abstractmethod
    def pinned(self, nbytes: int) -> memoryview:
        """Return pinned host memory, which the device can copy directly."""

    @abstractmethod
    def share(self, address: int) -> SharedAllocation:
        """Describe the allocation that contains an address, for other processes.

        Raises:
            BackendUnavailable: It cannot be shared; the text has the reason.
        """

    @abstractmethod
    def open_shared(self, handle: bytes) -> OpenedAllocation:
        """Open an allocation of another process. May wait for the device.

        Args:
            handle: From ``share`` in the other process; not to be trusted.

        Raises:
            BackendUnavailable: It cannot be opened on this device.
        """

    @abstractmethod
    def owns(self, event: object) -> bool:
        """Return whether an event belongs to this device."""


def library_event_index(event: object) -> int | None:
    """Return the GPU of an event of torch or CuPy.

    The result is -1 if the event has no GPU because any stream may wait for it, and
    None if the object is not an event.
    """
    if type(event).__module__.partition(".")[0] not in ("torch", "cupy"):
        return None
    if not hasattr(event, "synchronize") or hasattr(event, "wait_event"):
        return None  # an object that waits for events is a stream
    device = getattr(event, "device", None)
    index = getattr(device, "index", getattr(event, "device_id", None))
    return index if isinstance(index, int) else -1


class device_errors:  # noqa: N801 - a statement's word, as in contextlib
    """A context that raises a library's errors as BackendUnavailable.

    It is not a ``contextlib`` generator, for the reason given at
    :class:`kvwire.extras.needed_by`.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def __enter__(self) -> None:
        """Do nothing; the calls inside may fail."""

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        if isinstance(exc, Exception) and not isinstance(exc, KVWireError):
            raise BackendUnavailable(f"{self._device} does not work: {exc}") from exc


def contiguous(address: int, nbytes: int, owner: object, device: Device) -> Fragments:
    """Return contiguous device memory as one fragment."""
    return Fragments(
        np.array([address], np.uint64),
        np.array([nbytes], np.uint64),
        owner=owner,
        writable=True,
        device=device,
    )


class DeviceArray:
    """Device memory at an address, for array libraries to use without a copy.

    The user keeps the memory's owner alive and orders the streams.
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
