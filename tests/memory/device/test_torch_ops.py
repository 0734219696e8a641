"""What is asked of torch: shapes, addresses, and always on our own stream.

The torch of these tests is NumPy over host memory. It shows that the arithmetic is
right and that nothing is queued on another stream, not that a GPU does what torch says.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvwire.errors import BackendUnavailable
from kvwire.kv.fragments import Fragments
from kvwire.memory.device.ops import contiguous
from kvwire.memory.device.torch_ops import TorchOps, as_rows

OUR_STREAM = 0xABC


class Tensor:
    """A tensor over a NumPy array; whatever is done to it must be on our stream."""

    def __init__(self, torch: FakeTorch, array: npt.NDArray[Any]) -> None:
        self.torch = torch
        self.array = array

    def __getitem__(self, where: slice) -> Tensor:
        return Tensor(self.torch, self.array[where])

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numpy(self) -> npt.NDArray[Any]:
        return self.array

    def pin_memory(self) -> Tensor:
        return self

    def to(self, device: str, *, non_blocking: bool) -> Tensor:
        self.torch.queue(non_blocking, device)
        return Tensor(self.torch, self.array.copy())

    def copy_(self, other: Tensor, *, non_blocking: bool) -> None:
        self.torch.queue(non_blocking)
        self.array[...] = other.array

    def index_copy_(self, dim: int, index: Tensor, source: Tensor) -> None:
        self.torch.queue(dim == 0)
        assert source.array.dtype == self.array.dtype
        self.array[index.array] = source.array


class FakeEvent:
    """An event that notes where it was recorded."""

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "whoever waits for it would spin"
        self.stream: object = None

    def record(self, stream: object) -> None:
        self.stream = stream


class FakeTorch:
    """The part of torch that is used."""

    uint8 = np.uint8
    __version__ = "fake"

    def __init__(self) -> None:
        self.entered: list[int] = []
        self.queued = 0
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 1,
            Stream=lambda device: SimpleNamespace(cuda_stream=OUR_STREAM),
            stream=self._stream,
            current_stream=lambda index: f"the caller's on cuda:{index}",
            Event=FakeEvent,
        )
        self.version = SimpleNamespace(cuda="0")

    @contextmanager
    def _stream(self, stream: Any) -> Iterator[None]:
        self.entered.append(stream.cuda_stream)
        yield
        self.entered.pop()

    def queue(self, as_it_should: bool, device: str = "cuda:0") -> None:
        assert as_it_should
        assert device == "cuda:0"
        assert self.entered == [OUR_STREAM], "queued on another stream"
        self.queued += 1

    def empty(self, nbytes: int, **_: object) -> Tensor:
        return Tensor(self, np.zeros(nbytes, np.uint8))

    def from_numpy(self, array: npt.NDArray[Any]) -> Tensor:
        return Tensor(self, array)

    def frombuffer(self, buffer: memoryview, dtype: Any) -> Tensor:
        return Tensor(self, np.frombuffer(buffer, dtype))

    def as_tensor(self, memory: Any, device: str) -> Tensor:
        described = memory.__cuda_array_interface__
        address, read_only = described["data"]
        assert not read_only
        shape, dtype = described["shape"], np.dtype(described["typestr"])
        assert address % dtype.itemsize == 0, "a GPU refuses it"
        nbytes = int(np.prod(shape)) * dtype.itemsize
        held = (ctypes.c_char * nbytes).from_address(address)
        return Tensor(self, np.frombuffer(held, dtype).reshape(shape))

    def index_select(self, table: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
        self.queue(dim == 0)
        assert out.array.shape == (index.array.size, table.array.shape[1])
        assert out.array.dtype == table.array.dtype
        out.array[...] = table.array[index.array]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake


def pieces(memory: npt.NDArray[Any], pairs: list[tuple[int, int]]) -> Fragments:
    begin = memory.ctypes.data
    return Fragments(
        np.array([begin + offset for offset, _ in pairs], np.uint64),
        np.array([length for _, length in pairs], np.uint64),
        owner=memory,
        writable=True,
        device=None,
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 9)),
        min_size=1,
        max_size=20,
        unique_by=lambda row: row[0],
    ),
    unit=st.sampled_from([1, 2, 3, 4, 8, 12, 40]),
    shift=st.integers(0, 7),
    even=st.booleans(),
)
@example(rows=[(0, 2), (1, 2)], unit=8, shift=0, even=False)
def test_gather_and_scatter(
    torch: FakeTorch, rows: list[tuple[int, int]], unit: int, shift: int, *, even: bool
) -> None:
    """Whatever the lengths and their alignment, the same bytes are moved."""
    memory = np.random.default_rng(0).integers(0, 256, 2000, np.uint8)
    pairs = [(shift + at * unit, unit if even else n * unit) for at, n in rows]
    ops = TorchOps(0)
    stream = ops.stream()
    given = pieces(memory, pairs)
    packed = stream.buffer(given.nbytes)
    stream.gather(given, packed)
    slot = ops.pinned(given.nbytes)
    stream.to_host(packed, slot)
    assert bytes(slot) == b"".join(memory[at:][:n].tobytes() for at, n in pairs)
    # Behind what is named there is no memory.
    other = np.zeros(max(at + n for at, n in pairs), np.uint8)
    beside = np.ones(other.size, np.bool_)
    stream.scatter(packed, pieces(other, pairs))
    for at, n in pairs:
        assert np.array_equal(other[at : at + n], memory[at : at + n])
        beside[at : at + n] = False
    assert not other[beside].any()
    assert not torch.entered


def test_equal_fragments_are_one_row_each() -> None:
    """Blocks of a cache: no more rows than fragments, and none behind the last."""
    memory = np.zeros(10 * 4096, np.uint8)
    blocks = [(5 * 4096, 4096), (2 * 4096, 4096), (9 * 4096, 4096)]
    rows = as_rows(pieces(memory, blocks))
    assert (rows.row_bytes, rows.index.tolist()) == (4096, [3, 0, 7])
    assert rows.base + rows.count * rows.row_bytes == memory.ctypes.data + memory.size


def test_runs(torch: FakeTorch) -> None:
    memory = np.random.default_rng(0).integers(0, 256, 100, np.uint8)
    ops = TorchOps(0)
    stream, slot = ops.stream(), ops.pinned(30)
    given = pieces(memory, [(50, 10), (3, 7), (80, 13)])
    stream.to_host(given, slot)
    expected = (
        memory[50:60].tobytes() + memory[3:10].tobytes() + memory[80:93].tobytes()
    )
    assert bytes(slot) == expected
    memory[:] = 0
    stream.to_device(slot, given)
    assert memory[50:60].tobytes() == expected[:10]
    assert torch.queued == 6


def test_a_buffer_belongs_to_the_stream(torch: FakeTorch) -> None:
    """So the allocator never gives it to another before our work is done."""
    seen: list[list[int]] = []
    empty = torch.empty

    def noting(nbytes: int, **keywords: object) -> Tensor:
        seen.append(list(torch.entered))
        return empty(nbytes, **keywords)

    torch.empty = noting  # type: ignore[method-assign]
    buffer = TorchOps(0).stream().buffer(64)
    assert seen == [[OUR_STREAM]]
    assert buffer.nbytes == 64
    assert contiguous(1, 64, None, TorchOps(0).device).device == buffer.device


def test_a_gpu_that_there_is_not(torch: FakeTorch) -> None:
    with pytest.raises(BackendUnavailable, match="finds 1 GPUs, none has number 1"):
        TorchOps(1)
    torch.cuda.is_available = lambda: False
    with pytest.raises(BackendUnavailable, match="torch fake finds no GPU"):
        TorchOps(0)


def test_an_event_on_the_callers_stream(torch: FakeTorch) -> None:
    event = TorchOps(0).record_current()
    assert isinstance(event.native, FakeEvent)
    assert event.native.stream == "the caller's on cuda:0"
