"""What is asked of NVIDIA's driver: addresses, lengths, streams, what is kept alive.

The driver of these tests works on host memory, at once. It shows that the arithmetic is
right, not that a GPU does what its driver says: tests/gpu does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import BackendUnavailable, UsageError
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB
from kvwire.memory.device import cuda_driver
from kvwire.memory.device.cuda_driver import CudaDriver, CudaError
from kvwire.memory.device.cuda_ops import CudaOps
from kvwire.memory.device.ops import HANDLE_BYTES

_MAKE = ("cuModuleLoadData", "cuModuleGetFunction", "cuStreamCreate", "cuEventCreate")
_DESTROY = ("cuStreamDestroy_v2", "cuEventDestroy_v2")
_COPY = ("cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2")


class FakeDriver(CudaDriver):
    """The driver's functions over host memory; handles are numbers."""

    def __init__(self, gpus: int = 1) -> None:
        self.gpus = gpus
        self.fails = ""
        self.is_late = False  # nothing that was queued is over
        self.made = 0
        self.contexts = 0
        self.live: set[int] = set()
        self.memory: dict[int, Any] = {}
        self.launched: list[tuple[int, ...]] = []
        self.allocations: dict[int, int] = {}  # address and bytes
        self.opened: list[int] = []
        self._text = self._nothing
        self._functions: dict[str, Any] = {
            **dict.fromkeys(
                (*cuda_driver._BRIEF, *cuda_driver._WAITING), self._nothing
            ),
            **dict.fromkeys(_MAKE, self._make),
            **dict.fromkeys(_DESTROY, self._destroy),
            **dict.fromkeys(_COPY, self._copy),
            "cuDeviceGetCount": self._count,
            "cuEventQuery": self._query,
            "cuCtxPushCurrent_v2": self._push,
            "cuCtxPopCurrent_v2": self._pop,
            "cuMemAllocAsync": self._allocate,
            "cuMemFreeAsync": self._free,
            "cuLaunchKernel": self._launch,
            "cuMemGetAddressRange_v2": self._range,
            "cuIpcGetMemHandle": self._handle_of,
            "cuIpcOpenMemHandle_v2": self._open,
            "cuIpcCloseMemHandle": self._close,
        }

    def __call__(self, name: str, *arguments: object) -> None:
        if name == self.fails:
            raise CudaError(f"{name}: made to fail (999)")
        super().__call__(name, *arguments)

    def _query(self, _: int) -> int:
        return 600 if self.is_late else 0

    def _nothing(self, *_: object) -> int:
        return 0

    def _make(self, out: Any, *_: object) -> int:
        assert self.contexts, "no context is current"
        self.made += 1
        self.live.add(self.made)
        out._obj.value = self.made
        return 0

    def _destroy(self, handle: int) -> int:
        self.live.remove(handle)
        return 0

    def _count(self, out: Any) -> int:
        out._obj.value = self.gpus
        return 0

    def _push(self, _: int) -> int:
        self.contexts += 1
        return 0

    def _pop(self, _: Any) -> int:
        self.contexts -= 1
        return 0

    def _allocate(self, out: Any, nbytes: int, stream: int) -> int:
        assert stream in self.live
        block = np.zeros(nbytes, np.uint8)
        out._obj.value = block.ctypes.data
        self.memory[block.ctypes.data] = block
        return 0

    def _free(self, address: int, stream: int) -> int:
        assert stream in self.live, "freed in the order of a stream that is gone"
        del self.memory[address]
        return 0

    def _copy(self, to: int, source: int, nbytes: int, stream: int) -> int:
        assert stream in self.live
        assert self.contexts
        ctypes.memmove(to, source, nbytes)
        return 0

    def _range(self, first: Any, nbytes: Any, address: int) -> int:
        assert self.contexts
        for begin, size in self.allocations.items():
            if begin <= address < begin + size:
                first._obj.value, nbytes._obj.value = begin, size
                return 0
        return 1

    def _handle_of(self, handle: Any, first: int) -> int:
        assert first in self.allocations, "a handle is of a whole allocation"
        handle._obj.reserved[:8] = list(first.to_bytes(8, "little"))
        return 0

    def _open(self, mapped: Any, handle: Any, flags: int) -> int:
        assert self.contexts
        assert flags == 1
        first = int.from_bytes(bytes(handle)[:8], "little")
        if not first:
            return 1
        mapped._obj.value = first
        self.opened.append(first)
        return 0

    def _close(self, address: int) -> int:
        assert self.contexts
        self.opened.remove(address)
        return 0

    def _launch(self, _: int, *words: Any) -> int:
        """Do what pieces.cu says, with all blocks of threads one after the other."""
        *grid, _shared, stream, pointers, _extra = words
        assert stream in self.live
        self.launched.append(tuple(grid))
        table, count, one, gathers = (
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64)).contents.value
            for pointer in pointers
        )
        numbers = np.array((ctypes.c_uint64 * (2 * count + 1)).from_address(table))
        for i, address in enumerate(numbers[:count].tolist()):
            begin, end = numbers[count + i : count + i + 2].tolist()
            to, source = (one + begin, address) if gathers else (address, one + begin)
            ctypes.memmove(to, source, end - begin)
        return 0


def pieces(memory: npt.NDArray[Any], pairs: list[tuple[int, int]]) -> Fragments:
    begin = memory.ctypes.data
    return Fragments(
        np.array([begin + offset for offset, _ in pairs], np.uint64),
        np.array([length for _, length in pairs], np.uint64),
        owner=memory,
        writable=True,
        device=None,
    )


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 9)),
        min_size=1,
        max_size=20,
        unique_by=lambda row: row[0],
    ),
    unit=st.sampled_from([9, 12, 40]),
    shift=st.integers(0, 7),
)
def test_gather_and_scatter(rows: list[tuple[int, int]], unit: int, shift: int) -> None:
    """Whatever the lengths and their alignment, the same bytes are moved."""
    memory = np.random.default_rng(0).integers(0, 256, 2000, np.uint8)
    pairs = [(shift + at * unit, n) for at, n in rows]
    ops = CudaOps(0, FakeDriver())
    stream, given = ops.stream(), pieces(memory, pairs)
    packed, slot = stream.buffer(given.nbytes), ops.pinned(given.nbytes)
    stream.gather(given, packed)
    stream.to_host(packed, slot)
    assert bytes(slot) == b"".join(memory[at:][:n].tobytes() for at, n in pairs)
    other, beside = np.zeros_like(memory), np.ones(memory.size, np.bool_)
    stream.scatter(packed, pieces(other, pairs))
    for at, n in pairs:
        assert np.array_equal(other[at : at + n], memory[at : at + n])
        beside[at : at + n] = False
    assert not other[beside].any()


def test_runs() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 100, np.uint8)
    ops = CudaOps(0, FakeDriver())
    stream, slot = ops.stream(), ops.pinned(30)
    given = pieces(memory, [(50, 10), (3, 7), (80, 13)])
    expected = b"".join(memory[a:b].tobytes() for a, b in ((50, 60), (3, 10), (80, 93)))
    stream.to_host(given, slot)
    assert bytes(slot) == expected
    memory[:] = 0
    stream.to_device(slot, given)
    assert memory[50:60].tobytes() == expected[:10]


@pytest.mark.parametrize(
    ("count", "nbytes", "grid"),
    [(256, 4 * KIB, (256, 1)), (16, 256 * KIB, (16, 64)), (8192, 256, (4096, 1))],
)
def test_few_long_pieces_are_shared_by_blocks_of_threads(
    count: int, nbytes: int, grid: tuple[int, int]
) -> None:
    driver = FakeDriver()
    ops = CudaOps(0, driver)
    memory, stream = np.zeros(count * nbytes, np.uint8), ops.stream()
    many = pieces(memory, [(n * nbytes, nbytes) for n in range(count)])
    stream.gather(many, stream.buffer(many.nbytes))
    assert driver.launched[0][:2] == grid


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_nothing_is_left_and_memory_goes_before_its_stream(*, in_a_cycle: bool) -> None:
    """What was made for a stream is freed in its order, whoever is told first."""
    driver = FakeDriver()
    ops = CudaOps(0, driver)
    before = set(driver.live)
    stream, memory = ops.stream(), np.zeros(64, np.uint8)
    buffer = stream.buffer(64)
    stream.gather(pieces(memory, [(0, 3), (9, 4)]), buffer)
    event = stream.record()
    assert event.query()
    stream.close()
    if in_a_cycle:
        # The collector tells a cycle's objects in the order in which they were made.
        cycle: list[object] = [stream, buffer]
        cycle.append(cycle)
        del cycle
    del stream
    gc.collect()
    del buffer, event
    gc.collect()
    kept = {*ops.event_handles, *(t.copied.ptr for t in ops.tables if t.copied)}
    assert (driver.live - kept, driver.memory, driver.contexts) == (before, {}, 0)


def test_an_event_that_nobody_has_is_used_again() -> None:
    driver = FakeDriver()
    ops = CudaOps(0, driver)
    stream = ops.stream()
    one, other = stream.record(), stream.record()
    assert one.ptr != other.ptr
    freed, made = one.ptr, driver.made
    del one
    assert stream.record().ptr == freed
    assert driver.made == made


def test_pinned_memory_is_used_again_when_nobody_has_it() -> None:
    ops = CudaOps(0, FakeDriver())
    one = ops.pinned(5000)
    kept, address = one[7:9], np.frombuffer(one, np.uint8).ctypes.data
    del one
    other = ops.pinned(5001)
    assert np.frombuffer(other, np.uint8).ctypes.data != address, "it is still seen"
    del kept
    gc.collect()
    assert np.frombuffer(ops.pinned(6000), np.uint8).ctypes.data == address


@pytest.mark.parametrize("why", ["late", "no event"])
def test_a_table_is_used_again_when_its_copy_is_over(why: str) -> None:
    """And not when its stream is gone: what was queued is still done."""
    driver = FakeDriver()
    ops = CudaOps(0, driver)
    memory = np.zeros(64, np.uint8)
    many = pieces(memory, [(0, 3), (9, 4)])
    stream = ops.stream()
    driver.is_late = why == "late"
    driver.fails = "cuEventRecord" if why == "no event" else ""
    with contextlib.suppress(CudaError):
        stream.gather(many, stream.buffer(7))
    driver.fails = ""
    del stream
    gc.collect()
    other = ops.stream()
    other.gather(many, other.buffer(7))
    assert len({t.address for t in (*ops.tables, *ops.lost_tables)}) == 2
    driver.is_late = False
    for _ in range(3):
        other.gather(many, other.buffer(7))
    assert len({t.address for t in (*ops.tables, *ops.lost_tables)}) == 2


def test_a_stream_is_no_event() -> None:
    """CuPy's has a pointer too, which the driver would take for an event."""
    ops = CudaOps(0, FakeDriver())
    methods = {"ptr": 7, "synchronize": None, "wait_event": None}
    stream = type("Stream", (), {**methods, "__module__": "cupy.cuda.stream"})()
    assert not ops.owns(stream)
    with pytest.raises(UsageError, match="the event is a Stream"):
        ops.stream().wait(stream)


def test_pinned_memory_that_is_refused() -> None:
    driver = FakeDriver()
    driver.fails = "cuMemHostRegister_v2"
    with pytest.raises(BackendUnavailable, match=r"5000 bytes .* refused.*\(999\)"):
        CudaOps(0, driver).pinned(5000)


def test_a_gpu_that_there_is_not() -> None:
    with pytest.raises(BackendUnavailable, match="finds 1 GPUs, none has number 1"):
        CudaOps(1, FakeDriver())
    broken = FakeDriver()
    broken.fails = "cuDevicePrimaryCtxRetain"
    with pytest.raises(BackendUnavailable, match="cuda:0: cuDevicePrimaryCtxRetain"):
        CudaOps(0, broken)


def test_what_is_no_event() -> None:
    ops = CudaOps(0, FakeDriver())
    with pytest.raises(UsageError, match="the event is a str"):
        ops.stream().wait("soon")
    assert not ops.owns("soon")
    event = ops.record_current()
    assert ops.owns(event)
    assert not CudaOps(0, FakeDriver()).owns(event)
    ops.stream().wait(event)


# --- memory of other processes --------------------------------------------------------


def test_an_allocation_is_shared_as_a_whole() -> None:
    driver = FakeDriver()
    driver.allocations = {4096: 1000, 8192: 64}
    ops = CudaOps(0, driver)
    shared = ops.share(4097)
    assert shared[:2] == (4096, 1000)
    assert shared == ops.share(5095)
    assert len(shared.handle) == HANDLE_BYTES
    opened = ops.open_shared(shared.handle)
    assert opened[:2] == (4096, 1000)
    assert driver.opened == [4096]
    opened.close()
    assert not driver.opened
    assert not driver.contexts


def test_memory_that_has_no_handle_is_refused_by_name() -> None:
    driver = FakeDriver()
    driver.allocations = {4096: 1000}
    ops = CudaOps(0, driver)
    with pytest.raises(BackendUnavailable, match="cuda:0: the memory at 0x10 has no"):
        ops.share(16)
    driver.fails = "cuIpcGetMemHandle"
    with pytest.raises(BackendUnavailable, match="expandable_segments"):
        ops.share(4096)
    assert not driver.contexts


@pytest.mark.parametrize("nbytes", [0, 63, HANDLE_BYTES])
def test_a_handle_that_opens_nothing(nbytes: int) -> None:
    driver = FakeDriver()
    ops = CudaOps(0, driver)
    with pytest.raises(BackendUnavailable, match="cuda:0: "):
        ops.open_shared(bytes(nbytes))
    assert not driver.contexts


def test_memory_of_unknown_size_is_closed_again() -> None:
    driver = FakeDriver()
    driver.allocations = {4096: 1000}
    ops = CudaOps(0, driver)
    handle = ops.share(4096).handle
    driver.fails = "cuMemGetAddressRange_v2"
    with pytest.raises(BackendUnavailable, match="cannot be opened"):
        ops.open_shared(handle)
    assert not driver.opened
    assert not driver.contexts
