"""A device that this process plays: threads are streams, its memory is out of reach.

Its memory is one file, mapped twice. Tensors carry addresses of the first mapping,
which allows neither reading nor writing: host code that touches them is ended by
SIGSEGV, as on a real device. The threads that are its streams use the second one. Work
happens in its stream's order and beside everything else, so forgotten events show as
wrong bytes. :meth:`SimulatedDevice.hold` stops all streams, and makes any order of
events that a test is about.
"""

from __future__ import annotations

import itertools
import mmap
import os
import queue
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvwire.errors import BackendUnavailable, UsageError
from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire.memory.copy import copy
from kvwire.memory.device.ops import (
    DeviceOps,
    Event,
    OpenedAllocation,
    SharedAllocation,
    Stream,
    contiguous,
)
from kvwire.memory.device.registry import register, unregister
from kvwire.types import Device, MemoryKind
from tests.support.waiting import PATIENCE_S

# As CUDA's allocator aligns.
_ALIGNMENT: Final = 256
_MAGIC: Final = b"simulate"
_HANDLE: Final = struct.Struct("<8sII48x")
_indices: Final = itertools.count()


class SimulatedDevice(DeviceOps):
    """Memory and streams of a device that there is not."""

    def __init__(self, nbytes: int = 64 * MIB) -> None:
        self.device = Device(MemoryKind.SIMULATED, next(_indices))
        self.pinned_bytes_max = 1024 * MIB
        self._pinned_bytes = 0
        self._error = ""
        self._running = threading.Event()
        self._running.set()
        self._lock = threading.Lock()
        self._current = threading.local()
        # It stays open, since other processes find it by its number.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._file.truncate(nbytes)
        self._memory = _Memory(self._file.fileno(), nbytes)
        # That of other processes.
        self._opened: list[_Memory] = []
        self._streams: list[SimulatedStream] = []
        self.shares = True
        self._nbytes = nbytes
        self._used = 0
        register(self)

    # --- DeviceOps --------------------------------------------------------------------

    def stream(self) -> SimulatedStream:
        self._streams.append(made := SimulatedStream(self))
        return made

    def record_current(self) -> SimulatedEvent:
        """See DeviceOps; of a thread that has set no stream, one that has no work."""
        stream: SimulatedStream | None = getattr(self._current, "stream", None)
        if stream is not None:
            return stream.record()
        event = SimulatedEvent(self, None)
        event.fire()
        return event

    def pinned(self, nbytes: int) -> memoryview:
        with self._lock:
            if self._pinned_bytes + nbytes > self.pinned_bytes_max:
                raise BackendUnavailable(
                    f"{self.device}: {nbytes} bytes of pinned memory were refused"
                )
            self._pinned_bytes += nbytes
        return np.zeros(nbytes, np.uint8).data

    def owns(self, event: object) -> bool:
        return isinstance(event, SimulatedEvent | LibraryEvent) and event.device is self

    # --- memory -----------------------------------------------------------------------

    def array(self, values: npt.NDArray[Any], dtype: str = "") -> SimulatedArray:
        """Make an array in the device's memory with these values."""
        address = self.allocate(values.nbytes)
        made = SimulatedArray(self, address, values.shape, values.dtype, dtype)
        made.write(values)
        return made

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory, which is freed with the device."""
        with self._lock:
            begin = self._used
            if begin + nbytes > self._nbytes:
                raise UsageError(f"{self.device}: {nbytes} bytes are not free")
            self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._memory.begin + begin

    def reach(self, fragments: Fragments) -> Fragments:
        """Return the same memory where the device may touch it."""
        assert fragments.device == self.device, "memory of another device"
        memory = [self._memory, *self._opened]
        begins = np.array([one.begin for one in memory], np.uint64)
        ends = begins + np.array([one.nbytes for one in memory], np.uint64)
        firsts = fragments.addresses[:, np.newaxis]
        behind = firsts + fragments.lengths[:, np.newaxis]
        lies = (firsts >= begins) & (behind <= ends)
        assert lies.any(axis=1).all(), "memory that is not the device's"
        distances = np.array([one.distance % 2**64 for one in memory], np.uint64)
        return Fragments(
            fragments.addresses + distances[lies.argmax(axis=1)],
            fragments.lengths,
            owner=fragments.owner,
            writable=fragments.writable,
        )

    def share(self, address: int) -> SharedAllocation:
        """See DeviceOps: all of the memory is one allocation, as a segment of torch."""
        memory = self._memory
        if not memory.begin <= address < memory.begin + memory.nbytes:
            raise BackendUnavailable(f"{self.device}: no memory at {address:#x}")
        if not self.shares:
            raise BackendUnavailable(f"{self.device}: its memory has no handle")
        handle = _HANDLE.pack(_MAGIC, os.getpid(), self._file.fileno())
        return SharedAllocation(memory.begin, memory.nbytes, handle)

    def open_shared(self, handle: bytes) -> OpenedAllocation:
        magic, pid, fd = _HANDLE.unpack(handle)
        if magic != _MAGIC:
            raise BackendUnavailable(f"{self.device}: the handle is of no such device")
        try:
            with Path(f"/proc/{pid}/fd/{fd}").open("r+b") as file:
                nbytes = os.fstat(file.fileno()).st_size
                memory = _Memory(file.fileno(), nbytes)
        except (OSError, ValueError) as exc:
            raise BackendUnavailable(f"{self.device}: {exc}") from exc
        self._opened.append(memory)

        def close() -> None:
            self._opened.remove(memory)
            memory.close()

        return OpenedAllocation(memory.begin, memory.nbytes, close)

    @property
    def opened(self) -> int:
        """Return how many allocations of other processes are open."""
        return len(self._opened)

    # --- for tests --------------------------------------------------------------------

    def hold(self) -> None:
        """Stop every stream before its next piece of work."""
        self._running.clear()

    def release(self) -> None:
        """Let the streams go on."""
        self._running.set()

    def set_current(self, stream: SimulatedStream) -> None:
        """This thread's work is queued here from now on; ``torch.cuda.set_stream``."""
        self._current.stream = stream

    def fail(self, error: str) -> None:
        """From now on all work of all streams fails, as CUDA's errors stay."""
        self._error = error

    def close(self) -> None:
        """Forget the device, and free its memory when its streams have no work left.

        As on a real device, which finishes what it touches memory for, whoever failed.
        """
        self.release()
        unregister(self)
        for stream in self._streams:
            stream.end()
        assert not self._opened, "allocations of other processes are open"
        self._memory.close()
        self._file.close()

    @property
    def error(self) -> str:
        """Return how it has failed; "" if it has not."""
        return self._error

    def step(self, work: Callable[[], None]) -> None:
        """One piece of a stream's work."""
        self._running.wait()
        if not self._error:
            try:
                work()
            except Exception as exc:  # noqa: BLE001 - events report it
                self._error = str(exc)


class SimulatedArray:
    """Stands for an array on the device; answers as a torch tensor does."""

    def __init__(
        self,
        device: SimulatedDevice,
        address: int,
        shape: tuple[int, ...],
        item: np.dtype[Any],
        dtype: str,
    ) -> None:
        self.shape = shape
        self.dtype = dtype or item.name
        self.device = _Named("simulated", device.device.index)
        self._ops = device
        self._address = address
        self._item = item

    def __getitem__(self, row: int) -> SimulatedArray:
        nbytes = int(np.prod(self.shape[1:])) * self._item.itemsize
        place = self._address + row * nbytes
        return SimulatedArray(self._ops, place, self.shape[1:], self._item, self.dtype)

    def data_ptr(self) -> int:
        """Address of the first element; host code must not touch it."""
        return self._address

    def stride(self) -> tuple[int, ...]:
        """Elements from one to the next along each dimension."""
        steps = np.cumprod((1, *self.shape[:0:-1]), dtype=np.int64)
        return tuple(int(step) for step in steps[::-1])

    def element_size(self) -> int:
        return self._item.itemsize

    def read(self) -> npt.NDArray[Any]:
        """Return a copy of its values, now."""
        values = np.empty(self.shape, self._item)
        copy(self._reached(), values.reshape(-1).view(np.uint8).data)
        return values

    def write(self, values: npt.NDArray[Any]) -> None:
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        copy(flat.data, self._reached())

    def _reached(self) -> Fragments:
        nbytes = int(np.prod(self.shape)) * self._item.itemsize
        ops = self._ops
        return ops.reach(contiguous(self._address, nbytes, self, ops.device))


class SimulatedEvent(Event):
    """Fires when its stream comes to it."""

    def __init__(self, device: SimulatedDevice, stream: SimulatedStream | None) -> None:
        self.device = device
        self._stream = stream
        self._fired = threading.Event()
        self._error = ""

    @property
    def recorded_on(self) -> SimulatedStream | None:
        return self._stream

    def query(self) -> bool:
        if self._error:
            raise RuntimeError(self._error)
        return self._fired.is_set()

    def synchronize(self) -> None:
        self._fired.wait()
        self.query()

    def fire(self) -> None:
        """Its stream has come to it."""
        self._error = self.device.error
        self._fired.set()

    def passed(self) -> None:
        """Hold a stream here until it has fired."""
        self._fired.wait()


class LibraryEvent:
    """One that a library has recorded: as torch's, it does not name its stream."""

    def __init__(self, event: SimulatedEvent) -> None:
        self.device = event.device
        self.passed = event.passed


class SimulatedStream(Stream):
    """Does one piece of work after the other, on a thread."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"{device.device} stream", daemon=True
        )
        self._thread.start()

    @property
    def pointer(self) -> int:
        return 0

    def wait(self, event: object) -> None:
        assert isinstance(event, SimulatedEvent | LibraryEvent), "not of this device"
        self._work.put(event.passed)

    def record(self) -> SimulatedEvent:
        if not self._thread.is_alive():
            raise RuntimeError(f"{self._device.device}: the stream was closed")
        event = SimulatedEvent(self._device, self)
        self._work.put(event.fire)
        return event

    def buffer(self, nbytes: int) -> Fragments:
        device = self._device
        return contiguous(device.allocate(nbytes), nbytes, device, device.device)

    def gather(self, source: Fragments, into: Fragments) -> None:
        reach = self._device.reach
        self.call(lambda: copy(reach(source), reach(into)))

    def scatter(self, source: Fragments, into: Fragments) -> None:
        self.gather(source, into)

    def to_host(self, source: Fragments, into: memoryview) -> None:
        self.call(lambda: copy(self._device.reach(source), into))

    def to_device(self, source: memoryview, into: Fragments) -> None:
        self.call(lambda: copy(source, self._device.reach(into)))

    def call(self, work: Callable[[], None]) -> None:
        """Queue any work, such as a test's own kernel."""
        self._work.put(lambda: self._device.step(work))

    def close(self) -> None:
        self._work.put(None)

    def end(self) -> None:
        """Close it, and wait until its work is done."""
        self.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a stream whose work does not end"

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class _Memory:
    """A file that is mapped twice: out of reach, and within."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._mappings = mmap.mmap(fd, nbytes, prot=0), mmap.mmap(fd, nbytes)
        # Only addresses are used, so that the mappings can be closed.
        self.begin, within = (_address(mapping) for mapping in self._mappings)
        self.distance = within - self.begin

    def close(self) -> None:
        for mapping in self._mappings:
            mapping.close()


def _address(mapping: mmap.mmap) -> int:
    return int(np.frombuffer(mapping, np.uint8).ctypes.data)


class _Named:
    """Has the attributes of torch's ``device``."""

    def __init__(self, type: str, index: int) -> None:
        self.type = type
        self.index = index
