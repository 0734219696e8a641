"""Copies between views and fragment lists, by each way that moves pieces."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire.driver.checksums import ScratchPool
from kvwire.errors import UsageError
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB, MIB
from kvwire.memory import pieces
from kvwire.memory.buffers import MID_PAGE_BYTES, mid_page_memory
from kvwire.memory.checksum import checksum
from kvwire.memory.compiled import compiled_function
from kvwire.memory.copy import as_fragments, copy
from tests.memory.fragments import content, fill, scattered
from tests.support.compiled import need_compiled, without_compiled

Bytes = npt.NDArray[np.uint8]

# Around the lengths at which the way changes, and far from them.
_PIECES = [1, 3, 256, 4 * KIB, 8 * KIB - 1, 8 * KIB, 16 * KIB, 256 * KIB, 1 * MIB]


@pytest.fixture(params=["compiled", "one by one", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All ways to move pieces, each for all lengths."""
    name: str = request.param
    if name == "compiled":
        need_compiled()
        return name
    without_compiled(monkeypatch)
    knee = 2 * MIB if name == "numpy" else 0
    monkeypatch.setattr(pieces, "_PIECE_BYTES", knee)
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
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_split_into_any_split(
    way: str, splits: tuple[list[int], list[int]], seed: int
) -> None:
    source, _ = scattered(splits[0], seed)
    data = random_bytes(source.nbytes, seed).tobytes()
    fill(source, data)
    destination, around = scattered(splits[1], seed + 1, gap=2)
    copy(source, destination)
    assert content(destination) == data
    assert int(around.sum()) == sum(data), "bytes between pieces were written"


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
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_that_are_alike(
    way: str,
    count: int,
    length: int,
    gap: int,
    order: random.Random,
    data: st.DataObject,
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
    rows = (places[:, None] + np.arange(length)).ravel()
    rows = rows[begin : begin + part.nbytes]
    gathered = bytearray(part.nbytes)
    copy(part, memoryview(gathered))
    assert bytes(gathered) == memory[rows].tobytes()
    expected, sent = memory.copy(), random_bytes(part.nbytes, seed=2)
    expected[rows] = sent
    copy(sent.data, part)
    assert memory.tobytes() == expected.tobytes()


def test_nothing_to_copy() -> None:
    empty = as_fragments(memoryview(bytearray()))
    assert len(empty) == 0
    copy(empty, memoryview(bytearray()))
    copy(memoryview(b""), empty)


def test_lengths_must_agree() -> None:
    with pytest.raises(UsageError, match="3 bytes do not fit a destination of 4"):
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


def test_memory_of_our_own_begins_in_the_middle_of_a_page() -> None:
    for nbytes in (1, 64 * KIB, 8 * MIB):
        memory = mid_page_memory(nbytes)
        assert memory.nbytes == nbytes
        assert memory.ctypes.data % (4 * KIB) == MID_PAGE_BYTES
        pool = ScratchPool()
        assert as_fragments(pool.room(nbytes, 1)).addresses[0] % 4096 == MID_PAGE_BYTES


@pytest.mark.parametrize(("total", "released"), [(4 * MIB, 0), (5 * MIB, 1)])
def test_only_long_copies_let_go_of_the_gil(
    total: int, released: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time may cost the switch interval of another thread."""
    need_compiled()
    assert pieces.compiled is not None
    calls = [0, 0]

    def counted(index: int) -> Callable[..., None]:
        def call(*args: int) -> None:
            calls[index] += 1
            loops[index](*args)

        return call

    loops = pieces.compiled
    monkeypatch.setattr(pieces, "compiled", (counted(0), counted(1)))
    source, memory = scattered([64 * KIB] * (total // (64 * KIB)), 1)
    memory[:] = random_bytes(memory.size)
    destination, _ = scattered([64 * KIB] * (total // (64 * KIB)), 2)
    copy(source, destination)
    view = memoryview(bytearray(total))
    copy(memoryview(bytes(content(source))), view)
    assert content(destination) == content(source) == view
    # A short view goes by itself.
    assert calls == ([0, 2] if released else [1, 0])


@pytest.mark.parametrize("piece", [4 * KIB, 64 * KIB])
@pytest.mark.parametrize(("mib", "between"), [(1, 0), (4, 0), (10, 2)])
def test_without_a_compiler_other_threads_have_turns(
    piece: int, mib: int, between: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between parts of 4 MiB, and none for less: each may cost 5 ms."""
    turns: list[float] = []
    without_compiled(monkeypatch)
    monkeypatch.setattr("time.sleep", turns.append)
    source, memory = scattered([piece] * (mib * MIB // piece), 1)
    memory[:] = random_bytes(memory.size)
    destination, _ = scattered([piece] * (mib * MIB // piece), 2)
    copy(source, destination)
    assert content(destination) == content(source)
    assert turns == [0] * between


def test_no_library_is_no_error(tmp_path: Path) -> None:
    """Nor is one that is not for this machine."""
    library = tmp_path / "_copy.so"
    assert compiled_function("kvwire_copy", library=library) is None
    library.write_bytes(b"\x7fELF, but not for us")
    assert compiled_function("kvwire_copy", library=library) is None


# --- the payload checksum does not depend on how the payload lies in memory -----------


def cut(data: bytes, borders: set[int]) -> Fragments:
    """The same bytes as fragments that lie in any order in memory."""
    edges = [0, *sorted(b for b in borders if 0 < b < len(data)), len(data)]
    fragments, _ = scattered([b - a for a, b in itertools.pairwise(edges)], 1)
    fill(fragments, data)
    return fragments


@given(st.binary(min_size=1, max_size=2000), st.sets(st.integers(1, 1999)))
def test_fragments_have_the_checksum_of_their_bytes(
    data: bytes, borders: set[int]
) -> None:
    assert checksum(cut(data, borders)) == checksum(memoryview(data))


@pytest.mark.parametrize("length", [1, 61, 2047, 2048, 4096, 70_000])
def test_gathered_or_not_it_is_the_same(length: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 700_001, np.uint8).tobytes()
    fragments = cut(data, set(range(0, len(data), length)))
    assert checksum(fragments) == checksum(memoryview(data))


@pytest.mark.parametrize("runs", [1, 3, 7, 8, 9, 30])
def test_of_runs_of_different_lengths(runs: int) -> None:
    data = np.random.default_rng(2).integers(0, 256, 700_001, np.uint8).tobytes()
    edges = np.cumsum([200 + run % 2 for run in range(runs) for _ in range(40)])
    assert checksum(cut(data, set(edges.tolist()))) == checksum(memoryview(data))


@pytest.mark.parametrize("offset", [1, 4095, 4096, 5000])
def test_of_a_chunk_that_begins_and_ends_within_a_fragment(offset: int) -> None:
    data = np.random.default_rng(3).integers(0, 256, 600_000, np.uint8).tobytes()
    fragments = cut(data, set(range(0, len(data), 4096)))
    chunk = memoryview(data)[offset : offset + 400_001]
    assert checksum(fragments.slice(offset, len(chunk))) == checksum(chunk)


@given(st.binary(min_size=1, max_size=500), st.data())
def test_a_flipped_bit_changes_it(data: bytes, choice: st.DataObject) -> None:
    bit = choice.draw(st.integers(0, len(data) * 8 - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert checksum(memoryview(flipped)) != checksum(memoryview(data))


def test_it_is_the_low_half_of_xxh3() -> None:
    data = bytes(range(256)) * 100
    expected = xxhash.xxh3_64_intdigest(data) & 0xFFFF_FFFF
    assert checksum(memoryview(data)) == expected


@pytest.mark.parametrize("kind", ["view", "fragments"])
def test_of_nothing(kind: str) -> None:
    empty = memoryview(b"")
    payload = empty if kind == "view" else as_fragments(empty)
    assert checksum(payload) == xxhash.xxh3_64_intdigest(b"") & 0xFFFF_FFFF
