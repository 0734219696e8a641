"""The compiled loop against NumPy: any pieces of any length, at any address.

From 8 MiB on it stores whole lines past the caches: totals lie on both sides of that.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.limits import KIB, MIB
from kvwire.memory import pieces
from kvwire.memory.compiled import compiled_function
from kvwire.memory.copy import copy
from kvwire.memory.pieces import copy_pieces
from tests.memory.fragments import content, fill, scattered

Bytes = npt.NDArray[np.uint8]

pytestmark = pytest.mark.skipif(
    pieces.compiled is None,
    reason="kvwire was installed without a C compiler: there is no _copy.so",
)

_TOTAL_MAX = 16 * MIB
_LINE = 64
# Parts of a line, about the shortest that goes past the caches, blocks, and whole
# requests.
_LENGTHS = st.one_of(
    st.integers(0, 3),
    st.integers(0, 2 * _LINE + 1),
    st.integers(KIB - 2, KIB + _LINE),
    st.integers(0, 64 * KIB),
    st.integers(MIB, 3 * MIB),
)


@dataclass(frozen=True)
class Side:
    """Says where pieces lie in an array: a place each, which do not overlap."""

    places: Sequence[int]
    nbytes: int

    @classmethod
    def of(cls, lengths: list[int], seed: int, first: int, gap: int) -> Side:
        """Lay pieces out in a random order, behind ``first`` bytes."""
        places, end = [0] * len(lengths), first
        for index in np.random.default_rng(seed).permutation(len(lengths)).tolist():
            places[index] = end
            end += lengths[index] + gap
        return cls(places, end)

    def addresses(self, memory: Bytes) -> npt.NDArray[np.uint64]:
        """Return where the pieces begin."""
        return np.array(self.places, np.uint64) + np.uint64(memory.ctypes.data)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], Side, Side]:
    """Lengths of pieces, and where they lie on either side."""
    drawn = draw(st.lists(_LENGTHS, max_size=40))
    if draw(st.booleans()):
        drawn = [1, 3 * MIB, 0, 3 * MIB + 1, 2 * MIB, *drawn]
    ends = itertools.accumulate(drawn)
    lengths = [n for n, end in zip(drawn, ends, strict=True) if end <= _TOTAL_MAX]
    first, gap = st.integers(0, _LINE - 1), st.integers(0, _LINE + 1)
    seed = draw(st.integers(0, 2**32 - 2))
    return (
        lengths,
        Side.of(lengths, seed, draw(first), draw(gap)),
        Side.of(lengths, seed + 1, draw(first), draw(gap)),
    )


@functools.cache
def noise(seed: int) -> Bytes:
    """Bytes that no two places have in common; whoever writes to them has a copy."""
    return np.random.default_rng(seed).integers(0, 256, _TOTAL_MAX + MIB, np.uint8)


@given(layouts())
def test_any_pieces(layout: tuple[list[int], Side, Side]) -> None:
    """Nothing beside them is written."""
    lengths, here, there = layout
    source, memory = noise(1)[: here.nbytes], noise(2)[: there.nbytes].copy()
    expected = memory.copy()
    for origin, target, n in zip(here.places, there.places, lengths, strict=True):
        expected[target : target + n] = source[origin : origin + n]
    columns = here.addresses(source), there.addresses(memory)
    copy_pieces(*columns, np.array(lengths, np.uint64), sum(lengths))
    assert np.array_equal(memory, expected)


@st.composite
def two_splits(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """The same total, cut twice without regard to one another."""
    total = draw(st.integers(1, 64 * KIB) | st.integers(4 * MIB, 12 * MIB))
    borders = st.sets(st.integers(1, total), max_size=50)
    edges = [sorted({0, *draw(borders), total}) for _ in range(2)]
    first, second = ([b - a for a, b in itertools.pairwise(each)] for each in edges)
    return first, second


@given(two_splits(), st.integers(0, _LINE + 1), st.integers(0, _LINE + 1))
def test_large_splits(
    splits: tuple[list[int], list[int]], gap_here: int, gap_there: int
) -> None:
    source, _ = scattered(splits[0], 1, gap=gap_here)
    data = noise(1)[: source.nbytes]
    fill(source, data.tobytes())
    destination, around = scattered(splits[1], 2, gap=gap_there)
    copy(source, destination)
    assert content(destination) == data.tobytes()
    assert int(around.sum()) == int(data.sum()), "bytes between pieces were written"


@pytest.mark.parametrize("piece", [KIB + 1, 4 * KIB, 64 * KIB + 4])
@pytest.mark.parametrize("streamed", [False, True])
def test_two_threads_whose_pieces_share_lines(piece: int, streamed: bool) -> None:
    """Each writes every other piece, without the GIL; neither undoes the other's."""
    total = 18 * MIB if streamed else 9 * MIB
    count = total // piece // 2 * 2
    source = np.resize(noise(1), count * piece)
    memory = np.zeros(count * piece + 1, np.uint8)
    places = np.arange(count, dtype=np.uint64) * np.uint64(piece)
    # Destinations begin one byte off, and the last piece comes first.
    origin = places + np.uint64(source.ctypes.data)
    target = places[::-1] + np.uint64(memory.ctypes.data + 1)
    begin = threading.Barrier(2)

    def run(which: int) -> None:
        lengths = np.full(count // 2, piece, np.uint64)
        begin.wait()
        copy_pieces(origin[which::2], target[which::2], lengths, int(lengths.sum()))

    threads = [threading.Thread(target=run, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = source.reshape(count, piece)[::-1].ravel()
    assert np.array_equal(memory[1:], expected)
    assert memory[0] == 0


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 3)])
def test_columns_of_other_lengths_are_not_read(sizes: tuple[int, int, int]) -> None:
    origin, target, lengths = (np.zeros(size, np.uint64) for size in sizes)
    with pytest.raises(ValueError, match="bytes of addresses"):
        copy_pieces(origin, target, lengths, 0)


def test_a_big_endian_machine_copies_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    assert compiled_function("kvwire_copy") is None
