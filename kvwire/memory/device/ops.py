"""What kvwire needs of a device: streams of work, events, pinned host memory, copies.

Two implementations: torch (:mod:`kvwire.memory.device.torch_ops`) and CuPy
(:mod:`kvwire.memory.device.cupy_ops`). Tests register a third: threads are its streams.

The rules are CUDA's. A stream does its work in order, beside the host; every method of
a stream only queues. Memory that queued work touches stays alive and unchanged until an
event recorded behind it has fired: that is the caller's business, here and there. The
device as a whole is never waited for.

Memory of a device is always given as :class:`~kvwire.kv.fragments.Fragments`, since
addresses and lengths are all that is known of it; contiguous memory is one fragment.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from kvwire.errors import BackendUnavailable, KVWireError, UsageError
from kvwire.extras import install_command
from kvwire.kv.fragments import Fragments
from kvwire.types import Device, MemoryKind


class Event(ABC):
    """Marks a point in a stream's work.

    Attributes:
        native: The library's own event, for streams of that library to wait on.
    """

    native: object

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
        """Return the library's own handle, such as a ``cudaStream_t``; 0 for none."""

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


class CudaStream(Stream):
    """Holds a stream that is a pointer, which torch and CuPy both take."""

    index: int

    def wait(self, event: object) -> None:
        """Wait for an event of ours, or of either library.

        Only the library that made it can have a stream wait for it.

        Raises:
            UsageError: It is none of these.
        """
        native: Any = event.native if isinstance(event, Event) else event
        library = type(native).__module__.partition(".")[0]
        if library == "torch":
            import torch  # noqa: PLC0415 - there is an event of it, so it is imported

            stream = torch.cuda.ExternalStream(self.pointer, device=self.index)
            stream.wait_event(native)
        elif library == "cupy":
            import cupy  # noqa: PLC0415 - likewise

            with cupy.cuda.Device(self.index):
                stream = cupy.cuda.ExternalStream(self.pointer, self.index)
                stream.wait_event(native)
        else:
            raise UsageError(
                f"an event of type {type(native).__name__}: pass a torch.cuda.Event or "
                f"a cupy.cuda.Event that was recorded on the producing stream"
            )


class DeviceOps(ABC):
    """Works with one device through one library."""

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
        """Tell whether this library's streams can wait for an event."""


def device_ops(device: Device) -> DeviceOps:
    """Return the ops of a device, made on first use and kept.

    Of torch and CuPy that which the process has imported is taken, torch first: its
    allocator then knows of our streams.
    """
    with _lock:
        found = _known.get(device)
        if found is None:
            if device.kind is not MemoryKind.CUDA:
                raise UsageError(f"device {device}: there is none, or it was closed")
            found = _known[device] = _cuda_ops(device.index)
        return found


def event_ops(event: object) -> DeviceOps | None:
    """Return the ops of an event's device; None if it is no device's event."""
    with _lock:
        known = list(_known.values())
    for ops in known:
        if ops.owns(event):
            return ops
    index = _cuda_event_index(event)
    return None if index is None else device_ops(Device(MemoryKind.CUDA, index))


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


def _cuda_ops(index: int) -> DeviceOps:
    # Imported on demand, and each of them imports this module.
    from kvwire.memory.device.cupy_ops import CupyOps  # noqa: PLC0415
    from kvwire.memory.device.torch_ops import TorchOps  # noqa: PLC0415

    makers: list[tuple[str, Callable[[int], DeviceOps]]] = [
        ("torch", TorchOps),
        ("cupy", CupyOps),
    ]
    makers.sort(key=lambda maker: maker[0] not in sys.modules)
    reasons = []
    for name, maker in makers:
        try:
            return maker(index)
        except BackendUnavailable as exc:
            reasons.append(f"{name}: {exc}")
    raise BackendUnavailable(
        f"nothing here drives cuda:{index} ({'; '.join(reasons)}); "
        f"{install_command('torch')}, or the extra cuda12 or cuda13 for CuPy"
    )


def _cuda_event_index(event: Any) -> int | None:
    """Return the GPU of a torch or CuPy event, judged by its type's module."""
    library = type(event).__module__.partition(".")[0]
    if not hasattr(event, "synchronize") or library not in ("torch", "cupy"):
        return None
    device = getattr(event, "device", None)
    index = getattr(device, "index", getattr(event, "device_id", None))
    # An event that does not say it is waited for on the first: CUDA lets a stream wait
    # for events of any GPU.
    return index if isinstance(index, int) and index >= 0 else 0
