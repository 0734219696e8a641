"""What has landed, cell by cell, against counting bytes one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import UsageError
from kvwire.kv.coverage import Coverage
from kvwire.kv.landed import Landed
from kvwire.kv.plan import Segment
from kvwire.kv.spec import KVSpec
from tests.kv.reference import walk_elements
from tests.kv.scenarios import (
    Scenario,
    partitions,
    plan_of,
    scenarios,
    segments_of,
)
from tests.support.depth import examples

SPEC = KVSpec(layers=3, kv_heads=1, head_dim=2, block_tokens=4)


@given(scenarios(), st.data())
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_blocks_land_when_their_last_byte_does(
    scenario: Scenario, data: st.DataObject
) -> None:
    """A block of a layer has landed exactly if none of its elements is missing."""
    _, plan = scenario.plans()
    (walk,) = plan.groups
    landed = Landed(plan)
    block_tokens = scenario.consumer.store.spec.block_tokens
    expected = np.ones((len(walk.layers), len(scenario.consumer.ids)), np.bool_)
    for segment in data.draw(partitions(plan)):
        nbytes = plan.nbytes_of(segment)
        ranges = data.draw(missing_ranges(nbytes))
        landed.mark_but(segment, ranges)
        for number, element in enumerate(walk_elements(walk, segment)):
            first = number * walk.item_bytes
            if any(a < first + walk.item_bytes and first < a + n for a, n in ranges):
                row = element.layer - walk.layers.start
                expected[row, element.token // block_tokens] = False
    np.testing.assert_array_equal(landed.by_layer(0), expected)
    np.testing.assert_array_equal(landed.blocks(0), expected.all(axis=0))
    assert landed.complete == expected.all()
    for row, layer in enumerate(walk.layers):
        assert landed.layer(layer) == expected[row].all()
    prefix = int(np.cumprod(expected.all(axis=0)).sum())
    assert landed.usable_prefix == prefix
    assert landed.usable_tokens == min(prefix * block_tokens, walk.tokens)


@st.composite
def missing_ranges(draw: st.DrawFn, nbytes: int) -> list[tuple[int, int]]:
    """Up to two byte ranges of a segment, often none."""
    starts = draw(st.lists(st.integers(0, nbytes - 1), max_size=2))
    return [(start, draw(st.integers(1, nbytes - start))) for start in starts]


def test_a_state_is_all_or_nothing() -> None:
    """It is of one position, and so is what may be used beside it."""
    state = KVSpec(
        layers=2,
        kv_heads=1,
        head_dim=6,
        block_tokens=1,
        dtype="uint8",
        components=1,
        kind="state",
    )
    one_token = KVSpec(layers=1, kv_heads=1, head_dim=2, block_tokens=1)
    landed = Landed(plan_of({"full": (one_token, [1]), "state": (state, [3])}))
    for segment in segments_of(landed.plan, group="full"):
        landed.mark(segment)
    landed.mark(segments_of(landed.plan, layers=0, group="state")[0])
    assert landed.usable_tokens == 0
    landed.mark(segments_of(landed.plan, layers=1, group="state")[0])
    assert landed.usable_tokens == 1


def test_a_window_allows_no_earlier_end() -> None:
    """The last tokens of a window group say nothing about a shorter prompt."""
    landed = Landed(plan_of({"full": (SPEC, [1, 2, 3]), "window": (SPEC, [8])}))
    for segment in segments_of(landed.plan, group="full"):
        landed.mark(segment)
    assert (landed.usable_tokens, landed.usable_prefix) == (0, 0)
    for segment in segments_of(landed.plan, group="window"):
        landed.mark(segment)
    assert (landed.usable_tokens, landed.usable_prefix) == (12, 3)


@given(scenarios(), st.data())
@settings(max_examples=examples(30))
def test_boxes_cover_what_landed_and_the_lacking_what_did_not(
    scenario: Scenario, data: st.DataObject
) -> None:
    """Each cell in exactly one of them, so nothing is sent twice after a lost link."""
    blocks = len(scenario.consumer.ids)
    have = np.array([data.draw(st.booleans()) for _ in range(blocks)])
    _, plan = scenario.plans({"kv": have})
    landed = Landed(plan)
    parts = data.draw(partitions(plan))
    for segment in parts:
        if data.draw(st.booleans()):
            landed.mark(segment)
    told = Landed(plan)
    told.mark_boxes(landed.boxes(10_000))
    assert told.boxes(10_000) == landed.boxes(10_000)
    np.testing.assert_array_equal(told.by_layer(0), landed.by_layer(0))
    # So many as fit are told, and taken.
    Landed(plan).mark_boxes(landed.boxes(data.draw(st.integers(0, 9))))
    for segment in parts:
        lacking = landed.lacking(segment)
        # What was here before moves nothing, and may be a part by itself.
        moving = sum(map(plan.nbytes_of, lacking))
        free = bool(moving) or not plan.nbytes_of(segment)
        assert free or not landed.claim(segment)
        for part in lacking:
            assert landed.claim(part)
    (whole,) = plan.segments()
    assert landed.nbytes == plan.nbytes
    assert [s for s in landed.lacking(whole) if plan.nbytes_of(s)] == []


def test_whole_layers_are_one_box() -> None:
    """However many segments they came in; and no more boxes than asked for."""
    landed = Landed(plan_of({"a": (SPEC, [5, 3]), "b": (SPEC, [1])}))
    for layer in (0, 1):
        for block in (0, 1):
            for segment in segments_of(landed.plan, layer, block, "a"):
                landed.mark(segment)
    (last,) = segments_of(landed.plan, 2, None, "b")
    landed.mark(last)
    assert landed.boxes(9) == [Segment(0, 0, 2, 0, 2), last]
    assert landed.boxes(1) == [Segment(0, 0, 2, 0, 2)]
    told = Landed(landed.plan)
    told.mark_boxes(landed.boxes(9))
    assert told.boxes(9) == landed.boxes(9)
    (whole,) = segments_of(landed.plan, group="a")
    assert landed.lacking(whole) == [Segment(0, 2, 1, 0, 2)]


WIDE = KVSpec(layers=4, kv_heads=1, head_dim=1, block_tokens=1)


@pytest.mark.parametrize(
    "boxes",
    [
        pytest.param([Segment(0, 0, 4, 0, 9)] * 2, id="all of it, twice"),
        pytest.param([Segment(0, 0, 4, 0, 2), Segment(0, 1, 1, 1, 2)], id="an overlap"),
        pytest.param(
            [
                *(Segment(0, 0, 4, granule, 1) for granule in (0, 2, 4)),
                *(Segment(0, layer, 1, 6 + layer % 2, 1) for layer in range(4)),
            ],
            id="columns and rows, whose gaps are many more",
        ),
    ],
)
def test_boxes_that_nobody_would_tell(boxes: list[Segment]) -> None:
    """A thousand that each are everything, or leave out 70,000 pieces, cost seconds."""
    landed = Landed(plan_of({"kv": (WIDE, list(range(9)))}))
    before = landed.left
    with pytest.raises(UsageError, match="overlap or do not follow rows"):
        landed.mark_boxes(boxes)
    assert landed.left == before


def test_boxes_outside_the_transfer() -> None:
    landed = Landed(plan_of({"kv": (WIDE, [0, 1])}))
    with pytest.raises(UsageError, match="granules 1 to 2 are outside the 2"):
        landed.mark_boxes([Segment(0, 0, 1, 0, 1), Segment(0, 0, 1, 1, 2)])
    assert landed.left == 8


def test_granules_land_in_every_layer() -> None:
    """Whatever of them had landed before, and not in another group."""
    landed = Landed(plan_of({"a": (SPEC, [5, 3, 1]), "b": (SPEC, [1])}))
    (early,) = segments_of(landed.plan, 0, 0, "a")
    landed.mark(early)
    before = landed.left
    landed.mark(early)  # a chunk comes again after a reconnect
    landed.mark_but(early, [])
    assert landed.left == before
    landed.mark_granules(0, np.array([True, False, True]))
    assert landed.blocks(0).tolist() == [True, False, True]
    assert not landed.blocks(1).any()
    assert landed.left == 2 * SPEC.layers
    assert not landed.layer(0, "a")
    landed.mark_granules(0, np.array([False, True, False]))
    assert landed.layer(0, "a")
    assert not landed.layer(0, "b")
    assert not landed.complete


def test_a_segment_of_another_plan_is_refused() -> None:
    landed = Landed(plan_of({"kv": (SPEC, [5, 3])}))
    for segment in (Segment(1, 0, 1, 0, 1), Segment(0, 0, 4, 0, 1)):
        with pytest.raises(UsageError, match="segment: "):
            landed.mark(segment)
    (segment,) = segments_of(landed.plan, layers=0)
    with pytest.raises(UsageError, match="segment: bytes"):
        landed.mark_but(segment, [(0, 10_000)])
    assert landed.nbytes == 0


# --- claims against an array of booleans, which says the same more slowly -------------


LAYERS, BLOCKS = 5, 7


def _ranges(size: int) -> st.SearchStrategy[range]:
    ends = st.tuples(st.integers(0, size), st.integers(0, size))
    return ends.map(lambda pair: range(min(pair), max(pair)))


@given(st.lists(st.tuples(_ranges(LAYERS), _ranges(BLOCKS)), max_size=12))
def test_any_marks_in_any_order(marks: list[tuple[range, range]]) -> None:
    """What is taken, complete, untouched, and the first gap."""
    claims = Coverage(LAYERS, BLOCKS)
    cells = np.zeros((LAYERS, BLOCKS), np.bool_)
    for layers, blocks in marks:
        part = cells[layers.start : layers.stop, blocks.start : blocks.stop]
        assert claims.overlaps(layers, blocks) == bool(part.any())
        assert claims.claim(layers, blocks) == (not part.any())
        if not part.any():
            part[:] = True
        assert claims.complete == bool(cells.all())
        assert claims.untouched == int((~cells.any(axis=1)).sum())
        if not cells.all():
            gap = tuple(int(index) for index in np.argwhere(~cells)[0])
            assert claims.first_gap() == gap
