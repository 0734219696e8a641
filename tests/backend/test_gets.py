"""Batches as gets: what they read is what the batch says, in fewer pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.backend.gets import GAP_BYTES, Gets, WindowRanges
from kvwire.backend.window import BlockRead, WindowMemory

RUN = 16
BLOCKS = 12
TABLE = 9_000_000


def batch(**changes: Any) -> BlockRead:
    made = BlockRead(
        pieces_from=np.array([1000], np.uint64),
        pieces_to=np.array([50_000], np.uint64),
        run=RUN,
        offsets_from=np.array([0], np.uint64),
        offsets_to=np.array([0], np.uint64),
        entries=np.array([0], np.uint64),
        generations=np.array([1], np.uint64),
        per_block=1,
        owner=None,
    )
    return made._replace(**changes)


def moved(gets: Gets) -> dict[int, int]:
    """The source of each byte here."""
    rows = zip(
        gets.here.tolist(), gets.there.tolist(), gets.lengths.tolist(), strict=True
    )
    return {
        here + at: there + at for here, there, length in rows for at in range(length)
    }


def ranges(*spans: tuple[int, int], entries: int = BLOCKS) -> WindowRanges:
    return WindowRanges(WindowMemory(spans=spans, table=(TABLE, 8 * entries)))


@given(
    st.lists(st.integers(0, BLOCKS), min_size=1, max_size=BLOCKS),
    st.permutations(range(BLOCKS)),
    st.integers(1, 3),
    st.booleans(),
)
def test_every_byte_of_a_good_block_is_read_from_its_place(
    ids: list[int], targets: list[int], tensors: int, side_by_side: bool
) -> None:
    """Block number BLOCKS lies beyond the table; it is left out whole."""
    nbytes = BLOCKS * RUN
    apart = nbytes if side_by_side else nbytes + 8
    found = ranges(*((1000 + t * apart, nbytes) for t in range(tensors)))
    to = targets[: len(ids)]
    made = batch(
        pieces_from=np.array([1000 + t * apart for t in range(tensors)], np.uint64),
        pieces_to=np.array([50_000 + t * 1000 for t in range(tensors)], np.uint64),
        offsets_from=np.array(ids, np.uint64) * np.uint64(RUN),
        offsets_to=np.array(to, np.uint64) * np.uint64(RUN),
        entries=np.array(ids, np.uint64),
    )
    gets, good = found.gets(made)
    assert good.tolist() == [one < BLOCKS for one in ids]
    expected = {
        50_000 + t * 1000 + place * RUN + at: 1000 + t * apart + one * RUN + at
        for t in range(tensors)
        for one, place in zip(ids, to, strict=True)
        if one < BLOCKS
        for at in range(RUN)
    }
    assert moved(gets) == expected


def test_blocks_that_follow_each_other_on_both_sides_are_one_get() -> None:
    offsets = np.arange(BLOCKS, dtype=np.uint64) * np.uint64(RUN)
    made = batch(
        offsets_from=offsets,
        offsets_to=offsets,
        entries=np.arange(BLOCKS, dtype=np.uint64),
    )
    gets, good = ranges((1000, BLOCKS * RUN)).gets(made)
    assert good.all()
    assert gets.lengths.tolist() == [BLOCKS * RUN]


@pytest.mark.parametrize(
    ("span", "inside"),
    [
        ((1000, RUN), True),
        ((1000, RUN - 1), False),
        ((1001, 10 * RUN), False),
        ((900, 100 + RUN), True),
        ((900, 100), False),
        ((10, 8), False),
    ],
)
@pytest.mark.parametrize("others", [(), ((5000, 64),)])
def test_no_get_leaves_the_exposed_memory(
    span: tuple[int, int], inside: bool, others: tuple[tuple[int, int], ...]
) -> None:
    gets, good = ranges(span, *others).gets(batch())
    assert good.tolist() == [inside]
    assert len(gets) == inside


def test_an_address_that_wraps_around_is_outside() -> None:
    made = batch(offsets_from=np.array([2**64 - 900], np.uint64))
    _, good = ranges((100, RUN)).gets(made)
    assert good.tolist() == [True]  # sums are taken modulo 2**64
    _, good = ranges((1000, RUN)).gets(made)
    assert good.tolist() == [False]


def test_a_block_of_which_one_granule_lies_outside_is_left_out() -> None:
    offsets = np.array([0, RUN, 2 * RUN, 9_999_999], np.uint64)
    made = batch(
        offsets_from=offsets,
        offsets_to=offsets,
        entries=np.array([0, 1], np.uint64),
        per_block=2,
    )
    gets, good = ranges((1000, 4 * RUN)).gets(made)
    assert good.tolist() == [True, False]
    assert gets.lengths.tolist() == [2 * RUN]


@given(
    st.lists(st.integers(0, 20_000), min_size=0, max_size=40),
)
def test_each_block_finds_its_generation(entries: list[int]) -> None:
    looks = ranges((1000, 64), entries=20_001).looks(np.array(entries, np.uint64))
    table = np.arange(20_001, dtype=np.uint64) + np.uint64(7)
    memory = int(looks.memory.__array_interface__["data"][0])
    rows = zip(*(one.tolist() for one in looks.gets), strict=True)
    for _, there, here, length in rows:
        first, count = (there - TABLE) // 8, length // 8
        at = (here - memory) // 8
        looks.memory[at : at + count] = table[first : first + count]
    assert looks.memory[looks.places].tolist() == [one + 7 for one in entries]
    assert looks.gets.lengths.sum() == looks.memory.nbytes


def test_generations_that_lie_apart_are_not_read_as_one_range() -> None:
    far = GAP_BYTES // 8 + 1
    found = ranges((1000, 64), entries=2 * far)
    assert len(found.looks(np.array([0, far], np.uint64)).gets) == 2
    assert len(found.looks(np.array([0, far - 1], np.uint64)).gets) == 1


@pytest.mark.parametrize("place", [(-1, 8), (2**62, 8), (8, 2**62), (8, -1)])
def test_an_address_that_no_process_has_is_refused(place: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="bytes at"):
        ranges(place)
    with pytest.raises(ValueError, match="bytes at"):
        WindowRanges(WindowMemory(spans=(), table=place))


def test_spans_that_touch_are_one_range() -> None:
    found = ranges((64, 64), (0, 64), (300, 8), (310, 0))
    assert found.places == [(0, 128), (300, 8), (TABLE, 8 * BLOCKS)]
