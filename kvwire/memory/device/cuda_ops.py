"""A GPU's operations through NVIDIA's driver: streams, events, copies, and a kernel.

Arrays may belong to any library: only their addresses matter, and all libraries of a
process share the GPU's *primary context*, which this module uses. docs/topics/gpu.md
lists the tests that ran on real GPUs.

If the calling thread has another context or GPU current, that one is restored
afterwards. Nothing here waits for the whole device. So this module avoids the functions
that wait for the device when they free memory: device memory is freed in the order of a
stream, and pinned memory is kept for the next request of the same size.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvwire.errors import BackendUnavailable, UsageError
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB
from kvwire.memory.device.cuda_driver import CudaDriver, CudaError, IpcHandle
from kvwire.memory.device.ops import (
    HANDLE_BYTES,
    DeviceOps,
    Event,
    OpenedAllocation,
    SharedAllocation,
    Stream,
    contiguous,
    library_event_index,
)
from kvwire.types import Device, MemoryKind

# Flags in cuda.h.
_STREAM_NON_BLOCKING: Final = 1  # no other stream waits for it
_EVENT_BLOCKING_SYNC: Final = 1  # waiting for it sleeps
_EVENT_DISABLE_TIMING: Final = 2
_HOST_PORTABLE: Final = 1
_IPC_LAZY_PEER_ACCESS: Final = 1  # another GPU's memory is read over NVLink or PCIe

_KERNEL: Final = "pieces.ptx"
# In one pass, a block of threads moves 4 KiB: 16 bytes per thread.
_THREADS: Final = 256
_PASS_BYTES: Final = 16 * _THREADS
# If there are more pieces than this, each block of threads moves several.
_GRID_MAX: Final = 4096
# The size of a table: room for 2,000 pieces, more than most chunks of 4 MiB have.
_TABLE_BYTES: Final = 32 * KIB
# The most blocks of threads that share a piece, so that a few long pieces also keep a
# GPU busy.
_SHARES_MAX: Final = 64


class CudaOps(DeviceOps):
    """The operations of a GPU, through its driver.

    Raises:
        BackendUnavailable: There is no such GPU.
    """

    def __init__(self, index: int, driver: CudaDriver | None = None) -> None:
        self.device: Device = Device(MemoryKind.CUDA, index)
        self.driver: CudaDriver = driver or CudaDriver()
        try:
            count = self.driver.number("cuDeviceGetCount")
            if index >= count:
                raise BackendUnavailable(
                    f"the driver finds {count} GPUs, none has number {index}"
                )
            number = self.driver.number("cuDeviceGet", index)
            self.context: CudaContext = CudaContext(
                self.driver, self.driver.handle("cuDevicePrimaryCtxRetain", number)
            )
            with self.context:
                code = Path(__file__).with_name(_KERNEL).read_bytes()
                module = self.driver.handle("cuModuleLoadData", code)
                self.kernel: int = self.driver.handle(
                    "cuModuleGetFunction", module, b"move_pieces"
                )
        except CudaError as exc:
            raise BackendUnavailable(f"cuda:{index}: {exc}") from None
        self._lock = threading.Lock()
        self._free: dict[int, list[mmap.mmap]] = {}
        # Events to reuse. Any thread may append to this list and pop from it.
        self.event_handles: list[int] = []
        # Pinned memory from which kernels' tables are copied, roughly the oldest first;
        # and tables whose copies cannot be known to have ended.
        self.tables: deque[_StagedTable] = deque()
        self.lost_tables: deque[_StagedTable] = deque()

    def stream(self) -> CudaStream:
        return CudaStream(self)

    def record_current(self) -> Event:
        with self.context:  # stream 0 belongs to the context
            return CudaEvent(self, _current_stream(self.device.index))

    def event_handle(self) -> int:
        """Return an unused event; its user puts it back into ``event_handles``."""
        with contextlib.suppress(IndexError):
            return self.event_handles.pop()
        with self.context:
            flags = _EVENT_BLOCKING_SYNC | _EVENT_DISABLE_TIMING
            return self.driver.handle("cuEventCreate", flags)

    def pinned(self, nbytes: int) -> memoryview:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            free = self._free.setdefault(size, [])
            pages = free.pop() if free else None
        if pages is None:
            pages = self._registered(size, nbytes)
        shown = (ctypes.c_ubyte * nbytes).from_buffer(pages)
        # The memory stays registered, since unregistering would wait for the whole
        # device.
        weakref.finalize(shown, free.append, pages).atexit = False
        return memoryview(shown).cast("B")

    def table(self, nbytes: int) -> _StagedTable:
        """Return a table of at least ``nbytes``, reusing one whose copy has ended."""
        for _ in range(len(self.tables)):
            with contextlib.suppress(IndexError):  # other threads take tables as well
                table = self.tables.popleft()
                if not table.is_over:
                    self.tables.append(table)
                elif table.words.nbytes >= nbytes:
                    return table
        return _StagedTable(self.pinned(max(2 * nbytes, _TABLE_BYTES)))

    def share(self, address: int) -> SharedAllocation:
        handle = IpcHandle()
        try:
            with self.context:
                first, nbytes = self._allocation(address)
                self.driver("cuIpcGetMemHandle", ctypes.byref(handle), first)
        except CudaError as exc:
            raise BackendUnavailable(
                f"{self.device}: the memory at {address:#x} has no IPC handle: {exc}; "
                "memory from torch's expandable_segments or cuMemAllocAsync has none"
            ) from None
        return SharedAllocation(first, nbytes, bytes(handle))

    def open_shared(self, handle: bytes) -> OpenedAllocation:
        if len(handle) != HANDLE_BYTES:
            raise BackendUnavailable(
                f"{self.device}: a handle has {len(handle)} bytes instead of "
                f"{HANDLE_BYTES}"
            )
        mapped = ctypes.c_uint64()
        try:
            with self.context:
                self.driver(
                    "cuIpcOpenMemHandle_v2",
                    ctypes.byref(mapped),
                    IpcHandle.from_buffer_copy(handle),
                    _IPC_LAZY_PEER_ACCESS,
                )
                # The size that the peer reported is not trusted: a kernel that reads
                # beyond the allocation destroys this process's context.
                first, nbytes = self._allocation(mapped.value)
                nbytes -= mapped.value - first
        except CudaError as exc:
            if mapped.value:
                self.context.free("cuIpcCloseMemHandle", mapped.value)
            raise BackendUnavailable(
                f"{self.device}: the peer's memory cannot be opened: {exc}"
            ) from None
        close = functools.partial(
            self.context.free, "cuIpcCloseMemHandle", mapped.value
        )
        return OpenedAllocation(mapped.value, nbytes, close)

    def owns(self, event: object) -> bool:
        if isinstance(event, CudaEvent):
            return event.ops is self
        index = library_event_index(event)
        return index is not None and index in (-1, self.device.index)

    def _allocation(self, address: int) -> tuple[int, int]:
        """Return the address and size of the allocation that contains an address."""
        first = ctypes.c_uint64()
        nbytes = ctypes.c_size_t()
        self.driver(
            "cuMemGetAddressRange_v2",
            ctypes.byref(first),
            ctypes.byref(nbytes),
            address,
        )
        return first.value, nbytes.value

    def _registered(self, size: int, nbytes: int) -> mmap.mmap:
        # Pages allocated by this process, not by the driver, because another process
        # may be allowed to read them (backends/kvwire_local).
        pages = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        try:
            with self.context:
                self.driver("cuMemHostRegister_v2", address, size, _HOST_PORTABLE)
        except CudaError as exc:
            raise BackendUnavailable(
                f"{self.device}: {nbytes} bytes of pinned memory were refused: {exc}"
            ) from None
        return pages


class CudaContext:
    """Makes a GPU's context current for the calling thread, within a ``with``."""

    def __init__(self, driver: CudaDriver, handle: int) -> None:
        self._driver = driver
        self._handle = handle

    def __enter__(self) -> None:
        self._driver("cuCtxPushCurrent_v2", self._handle)

    def __exit__(self, *_: object) -> None:
        self._driver.attempt("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def free(self, name: str, *arguments: object) -> None:
        """Call a function that frees something, from any thread; never raises."""
        if self._driver.attempt("cuCtxPushCurrent_v2", self._handle):
            self._driver.attempt(name, *arguments)
            self.__exit__()


class CudaEvent(Event):
    """An event of the driver, made so that waiting for it sleeps.

    torch's and CuPy's streams take it too: ``stream.wait_event(event)``.

    Attributes:
        ptr: The handle, under the name that CuPy uses.
    """

    def __init__(self, ops: CudaOps, stream: int) -> None:
        """Record the event after all queued work of a stream, given by handle."""
        self.ops: CudaOps = ops
        self.ptr: int = 0
        self.ptr = ops.event_handle()
        self._stream = stream
        ops.driver("cuEventRecord", self.ptr, stream)

    @property
    def recorded_on(self) -> int:
        return self._stream

    def query(self) -> bool:
        return self.ops.driver.is_done("cuEventQuery", self.ptr)

    def synchronize(self) -> None:
        self.ops.driver("cuEventSynchronize", self.ptr)

    def wait(self, stream: Any) -> None:
        """Make a torch stream wait for this event; torch itself calls it."""
        self.ops.driver("cuStreamWaitEvent", stream.cuda_stream, self.ptr, 0)

    def __del__(self) -> None:
        # A wait that has begun refers to the record it saw, so the event can be reused.
        if self.ptr:
            self.ops.event_handles.append(self.ptr)


class CudaStream(Stream):
    """A driver stream for kvwire's kernel and copies."""

    def __init__(self, ops: CudaOps) -> None:
        self.ops: CudaOps = ops
        self._driver = ops.driver
        self._owned = _OwnedStream(ops)
        self._handle = self._owned.handle
        self._owned.enter()
        # The kernel's table on the device. The table of the next kernel is written
        # after this kernel has used its own.
        self._table = _DeviceMemory(self._owned, _TABLE_BYTES)

    @property
    def pointer(self) -> int:
        return self._handle

    def wait(self, event: object) -> None:
        """Wait for an event of ours, or of torch or CuPy.

        Raises:
            UsageError: The object is not such an event.
        """
        # First torch's name for the handle, then CuPy's.
        handle = getattr(event, "cuda_event", getattr(event, "ptr", None))
        known = isinstance(event, CudaEvent) or library_event_index(event) is not None
        if not known or not isinstance(handle, int):
            raise UsageError(
                f"the event is a {type(event).__name__}: pass a torch.cuda.Event or a "
                "cupy.cuda.Event that was recorded on the producing stream"
            )
        if handle:  # torch creates the handle when the event is recorded
            with self.ops.context:
                self._driver("cuStreamWaitEvent", self._handle, handle, 0)

    def record(self) -> CudaEvent:
        return CudaEvent(self.ops, self._handle)

    def buffer(self, nbytes: int) -> Fragments:
        memory = _DeviceMemory(self._owned, nbytes)
        return contiguous(memory.address, nbytes, memory, self.ops.device)

    def gather(self, source: Fragments, into: Fragments) -> None:
        self._move(source, into, gathers=True)

    def scatter(self, source: Fragments, into: Fragments) -> None:
        self._move(into, source, gathers=False)

    def to_host(self, source: Fragments, into: memoryview) -> None:
        host = _address(into)
        with self.ops.context:
            for address, start, nbytes in _runs(source):
                self._driver(
                    "cuMemcpyDtoHAsync_v2", host + start, address, nbytes, self._handle
                )

    def to_device(self, source: memoryview, into: Fragments) -> None:
        host = _address(source)
        with self.ops.context:
            for address, start, nbytes in _runs(into):
                self._driver(
                    "cuMemcpyHtoDAsync_v2", address, host + start, nbytes, self._handle
                )

    def close(self) -> None:
        """Do nothing: dropping the last reference destroys the stream after its work.

        Memory allocated from it is freed in its order, and may live longer.
        """

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._owned.leave()

    def _move(self, pieces: Fragments, one: Fragments, *, gathers: bool) -> None:
        count = len(pieces)
        # Several blocks of threads per piece, if there are few pieces.
        passes = -(-int(pieces.lengths.max()) // _PASS_BYTES)
        shares = max(min(passes, _GRID_MAX // count, _SHARES_MAX), 1)
        grid = (min(count, _GRID_MAX), shares, 1)
        with self.ops.context:
            self._upload(pieces)
            numbers = (self._table.address, count, one.addresses.item(0), int(gathers))
            arguments = (ctypes.c_uint64 * len(numbers))(*numbers)
            first = ctypes.addressof(arguments)
            pointers = (ctypes.c_void_p * len(numbers))(
                *range(first, first + 8 * len(numbers), 8)
            )
            self._driver(
                "cuLaunchKernel",
                self.ops.kernel,
                *grid,
                _THREADS,
                1,
                1,
                0,
                self._handle,
                pointers,
                None,
            )

    def _upload(self, pieces: Fragments) -> None:
        """Queue the copy of the pieces' addresses and offsets to the device."""
        count = len(pieces)
        nbytes = 8 * (2 * len(pieces) + 1)
        if nbytes > self._table.nbytes:
            self._table = _DeviceMemory(self._owned, 2 * nbytes)
        staged = self.ops.table(nbytes)
        tables = self.ops.lost_tables
        staged.words[:count] = pieces.addresses
        staged.words[count : 2 * count + 1] = pieces.starts
        try:
            self._driver(
                "cuMemcpyHtoDAsync_v2",
                self._table.address,
                staged.address,
                nbytes,
                self._handle,
            )
            staged.copied = self.record()
            tables = self.ops.tables
        finally:
            tables.append(staged)  # kept even if the stream fails


class _StagedTable:
    """Pinned memory from which a kernel's table is copied to the device."""

    def __init__(self, memory: memoryview) -> None:
        self.words = np.frombuffer(memory, np.uint64, len(memory) // 8)
        self.address = int(self.words.ctypes.data)
        self.copied: CudaEvent | None = None

    @property
    def is_over(self) -> bool:
        """Return whether the last copy has ended."""
        assert self.copied is not None
        return self.copied.query()


class _OwnedStream:
    """A driver stream that lives until all memory allocated from it has been freed.

    The garbage collector may finalise the objects of a cycle in any order. So users are
    counted by ``enter`` and ``leave``, not by references.
    """

    def __init__(self, ops: CudaOps) -> None:
        self.ops = ops
        self._users = 0
        self._lock = threading.Lock()
        with ops.context:
            self.handle = ops.driver.handle("cuStreamCreate", _STREAM_NON_BLOCKING)

    def enter(self) -> None:
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:  # the driver still completes its queued work
            self.ops.context.free("cuStreamDestroy_v2", self.handle)


class _DeviceMemory:
    """Device memory, allocated and freed in the order of a stream."""

    def __init__(self, stream: _OwnedStream, nbytes: int) -> None:
        self._stream = stream
        self.address = 0
        self.nbytes = nbytes
        made = ctypes.c_uint64()
        with stream.ops.context:
            stream.ops.driver(
                "cuMemAllocAsync", ctypes.byref(made), nbytes, stream.handle
            )
        self.address = made.value
        stream.enter()

    def __del__(self) -> None:
        if self.address:
            stream = self._stream
            stream.ops.context.free("cuMemFreeAsync", self.address, stream.handle)
            stream.leave()


def _current_stream(index: int) -> int:
    """Return the current stream of the thread's library; 0 is the default stream."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_stream(index).cuda_stream)
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None:
        with cupy.cuda.Device(index):
            return int(cupy.cuda.get_current_stream().ptr)
    return 0


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _runs(fragments: Fragments) -> Iterator[tuple[int, int, int]]:
    """Yield (address, start, bytes) of each fragment; only for few fragments."""
    return zip(
        fragments.addresses.tolist(),
        fragments.starts.tolist()[:-1],
        fragments.lengths.tolist(),
        strict=True,
    )
