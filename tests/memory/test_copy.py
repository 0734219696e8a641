"""Copies between views and fragment lists, one by one and by NumPy."""

from __future__ import annotations

import ctypes
import itertools
import random
import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.driver.checksums import ScratchPool
from kvwire.errors import UsageError
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB, MIB
from kvwire.memory import copy as copy_module
from kvwire.memory.copy import MID_PAGE_BYTES, as_fragments, copy, mid_page_memory
from tests.memory.fragments import content, fill, scattered

Bytes = npt.NDArray[np.uint8]

# Around the lengths at which the way changes, and far from them.
_PIECES = [1, 3, 256, 4 * KIB, 8 * KIB - 1, 8 * KIB, 16 * KIB, 256 * KIB, 1 * MIB]


@pytest.fixture(params=["one by one", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to move pieces, each for all lengths."""
    name: str = request.param
    knee = 2 * MIB if name == "numpy" else 0
    monkeypatch.setattr(copy_module, "_PIECE_BYTES", knee)
    monkeypatch.setattr(copy_module, "_RUN_PIECES", 1 if knee else 10**9)
    return name


def random_bytes(count: int, seed: int = 1) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def cuts(draw: st.DrawFn, total: int) -> list[int]:
    borders = draw(st.sets(st.integers(1, max(1, total - 1)), max_size=60))
    edges = [0, *sorted(b for b in borders if b < total), total]
    return [b - a for a, b in itertools.pairwise(edges)]


@st.composite
def two_splits(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """The same total, cut twice without regard to one another."""
    total = draw(st.integers(1, 4 * KIB))
    return cuts(draw, total), cuts(draw, total)


@given(two_splits(), st.integers(0, 2**32 - 1))
def test_any_split_into_any_split(
    splits: tuple[list[int], list[int]], seed: int
) -> None:
    source, _ = scattered(splits[0], seed)
    data = random_bytes(source.nbytes, seed).tobytes()
    fill(source, data)
    together, _ = scattered(splits[1], seed + 1, gap=2)
    copy(source, together)
    assert content(together) == data
    for one_way in (copy_module._copy_one_by_one, copy_module._copy_by_numpy):
        destination, _ = scattered(splits[1], seed + 2, gap=2)
        borders = copy_module._borders(source, destination)
        origin = copy_module._places(source, borders[:-1])
        target = copy_module._places(destination, borders[:-1])
        one_way(origin, target, np.diff(borders))
        assert content(destination) == data


@pytest.mark.parametrize("piece", _PIECES)
def test_equal_pieces(way: str, piece: int) -> None:
    count = max(2, min(3000, 4 * MIB // piece))
    source, memory = scattered([piece] * count, 1)
    memory[:] = random_bytes(memory.size)
    destination, _ = scattered([piece] * count, 2)
    copy(source, destination)
    assert content(destination) == content(source)


@given(
    st.integers(1, 40),
    st.integers(1, 700),
    st.integers(0, 700),
    st.randoms(use_true_random=False),
    st.data(),
)
def test_pieces_that_are_alike(
    count: int, length: int, gap: int, order: random.Random, data: st.DataObject
) -> None:
    """In any order, at any distance, whole or a part: gathered, and scattered."""
    steps = list(range(count))
    order.shuffle(steps)
    places = np.array(steps) * (length + gap)
    memory = random_bytes(count * (length + gap))
    first = memory.ctypes.data
    whole = Fragments.uniform(
        (first + places).astype(np.uint64), length, owner=memory, writable=True
    )
    begin = data.draw(st.integers(0, whole.nbytes - 1))
    part = whole.slice(begin, data.draw(st.integers(1, whole.nbytes - begin)))
    if part.piece_bytes:
        assert part.lengths.tolist() == [part.piece_bytes] * len(part)
    rows = (places[:, None] + np.arange(length)).ravel()
    rows = rows[begin : begin + part.nbytes]
    gathered = bytearray(part.nbytes)
    copy(part, memoryview(gathered))
    assert bytes(gathered) == memory[rows].tobytes()
    expected, sent = memory.copy(), random_bytes(part.nbytes, seed=2)
    expected[rows] = sent
    copy(sent.data, part)
    assert memory.tobytes() == expected.tobytes()


def test_nothing_beside_the_destination_is_touched(way: str) -> None:
    source, memory = scattered([100] * 50, 1)
    memory[:] = 1
    destination, around = scattered([250] * 20, 2, gap=7)
    copy(source, destination)
    assert int(around.sum()) == 5000


def test_nothing_to_copy() -> None:
    empty = as_fragments(memoryview(bytearray()))
    assert len(empty) == 0
    copy(empty, memoryview(bytearray()))
    copy(memoryview(b""), empty)


def test_lengths_must_agree() -> None:
    with pytest.raises(UsageError, match="3 bytes into a destination of 4"):
        copy(memoryview(b"abc"), memoryview(bytearray(4)))


@pytest.mark.parametrize("kind", ["view", "fragments"])
def test_read_only_destination(kind: str) -> None:
    view = memoryview(b"abc")
    destination = view if kind == "view" else as_fragments(view)
    with pytest.raises(UsageError, match="destination is read-only"):
        copy(memoryview(b"xyz"), destination)


@pytest.mark.parametrize("to", ["view", "fragments"])
def test_aligned_pieces_are_copied_without_new_memory(to: str) -> None:
    """It would be faulted in page by page, each time anew."""
    source, _memory = scattered([4 * KIB] * 512, 5)
    destination: Fragments | memoryview = memoryview(bytearray(2 * MIB))
    if to == "fragments":
        destination, _beside = scattered([4 * KIB] * 512, 6)
    copy(source, destination)  # this thread has its memory for batches now
    tracemalloc.start()
    copy(source, destination)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 64 * KIB
    whole = destination if isinstance(destination, memoryview) else content(destination)
    assert whole == content(source)


@pytest.mark.parametrize("to_images", [True, False])
@pytest.mark.parametrize("gap", [0, 4 * KIB])
def test_images_need_no_turns(to_images: bool, gap: int) -> None:
    """Where one side lies side by side NumPy moves it, and keeps no GIL."""
    cache, cache_memory = scattered([32 * KIB] * 512, 7)
    offsets = np.arange(16, dtype=np.uint64) * np.uint64(MIB + gap)
    memory = mid_page_memory(16 * (MIB + gap))
    images = Fragments(
        np.uint64(memory.ctypes.data) + offsets,
        np.full(16, MIB, np.uint64),
        owner=memory,
        writable=True,
    )
    ends = (cache, images) if to_images else (images, cache)
    words = (cache_memory if to_images else memory).view(np.uint64)
    words[:] = np.arange(words.size)
    calls: list[int] = []
    copy(*ends, turn=lambda: calls.append(1))
    assert content(images) == content(cache)
    assert not calls, "it lets go of the GIL by itself"


def test_memory_of_our_own_begins_in_the_middle_of_a_page() -> None:
    for nbytes in (1, 64 * KIB, 8 * MIB):
        memory = mid_page_memory(nbytes)
        assert memory.nbytes == nbytes
        assert memory.ctypes.data % (4 * KIB) == MID_PAGE_BYTES
        pool = ScratchPool()
        assert as_fragments(pool.room(nbytes, 1)).addresses[0] % 4096 == MID_PAGE_BYTES


def test_only_long_pieces_let_go_of_the_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time may cost the switch interval of another thread."""
    released: list[int] = []
    memmove = ctypes.memmove

    def counted(target: int, origin: int, length: int) -> None:
        released.append(length)
        memmove(target, origin, length)

    monkeypatch.setattr(ctypes, "memmove", counted)
    for piece in (16 * KIB, 512 * KIB):
        source, memory = scattered([piece] * 4, 1)
        memory[:] = random_bytes(memory.size)
        destination, _ = scattered([piece] * 4, 2)
        copy(source, destination)
        assert content(destination) == content(source)
    assert released == [512 * KIB] * 4
