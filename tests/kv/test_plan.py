"""A plan moves exactly the elements that both sides have, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.kv.plan import Segment, TransferPlan
from kvwire.kv.spec import KVSpec
from tests.kv.reference import (
    Shape,
    gather,
    plain_shape,
    read_walk,
    scatter,
)
from tests.kv.scenarios import Scenario, pair_of, scenarios

LAYOUTS = {
    "NHD": plain_shape("block kv token head dim"),
    "HND": plain_shape("block kv head token dim"),
    "kv first": plain_shape("kv block token head dim"),
    "packed": plain_shape("block head token (kv dim)"),
    "slots": plain_shape("kv (block token) head dim"),
    "apart": plain_shape("block token head dim", form="pairs"),
    "cross NHD": plain_shape("block layer kv token head dim", form="cross"),
    "cross HND": plain_shape("block layer kv head token dim", form="cross"),
    "layer first": plain_shape("layer kv block token head dim", form="cross"),
    "layer last": plain_shape("block token kv head layer dim", form="cross"),
    "views": plain_shape("block layer kv token head dim", form="views"),
}
MLA = {
    "MLA": plain_shape("block token dim"),
    "MLA cross": plain_shape("block layer token dim", form="cross"),
    "MLA with kv": plain_shape("block kv token head dim"),
}
SIZES = [(4, 4), (2, 4), (4, 2), (6, 4)]
SPEC = KVSpec(layers=2, kv_heads=2, head_dim=3, block_tokens=1)


def pairs_of(shapes: dict[str, Shape]) -> list[object]:
    """Every ordered pair, each with a name."""
    pairs = itertools.product(shapes, repeat=2)
    return [pytest.param(a, b, id=f"{a} to {b}") for a, b in pairs]


@pytest.mark.parametrize(("here", "there"), pairs_of(LAYOUTS))
def test_every_pair_of_layouts(here: str, there: str) -> None:
    for sizes in SIZES:
        scenario = pair_of(SPEC, LAYOUTS[here], LAYOUTS[there], sizes=sizes)
        check_transfer(scenario, split_by_layer)


@pytest.mark.parametrize(("here", "there"), pairs_of(MLA))
def test_every_pair_of_mla_layouts(here: str, there: str) -> None:
    spec = KVSpec(layers=2, kv_heads=1, head_dim=5, block_tokens=1, components=1)
    for sizes in SIZES:
        scenario = pair_of(spec, MLA[here], MLA[there], sizes=sizes)
        check_transfer(scenario, split_by_layer)


@given(scenarios(), st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_two_shares(scenario: Scenario, data: st.DataObject) -> None:
    """Any layouts, block sizes, shards, replicas and stages; marks in any order."""
    check_transfer(scenario, lambda plan: data.draw(partitions(plan)))


def check_transfer(
    scenario: Scenario, split: Callable[[TransferPlan], list[Segment]]
) -> None:
    """Move every segment by fragments; compare with moving element by element."""
    here, there = scenario.producer, scenario.consumer
    here.store.fill(here.ids)
    producer, consumer = scenario.plans()
    assert producer.digest == consumer.digest
    assert producer.nbytes == consumer.nbytes
    (walk,) = producer.groups
    expected = there.store.copy()
    for element in there.store.elements(len(there.ids)):
        carried = element.token < walk.granules * walk.granule_tokens
        if carried and element.layer in walk.layers and element.head in walk.heads:
            source, at = here.store.place(here.ids, element)
            target, to = expected.place(there.ids, element)
            target[to] = source[at]
    moved = 0
    for segment in split(producer):
        fragments = producer.fragments(segment)
        data = gather(fragments)
        assert data == read_walk(here.store, here.ids, walk, segment)
        assert len(data) == producer.nbytes_of(segment) == consumer.nbytes_of(segment)
        scatter(data, consumer.fragments(segment))
        moved += len(data)
    assert moved == producer.nbytes
    for raw, wanted in zip(there.store.raw, expected.raw, strict=True):
        np.testing.assert_array_equal(raw, wanted)


def split_by_layer(plan: TransferPlan) -> list[Segment]:
    """One segment a layer, the last layer first."""
    (walk,) = plan.groups
    return [s for layer in reversed(walk.layers) for s in plan.segments(layers=layer)]


@st.composite
def partitions(draw: st.DrawFn, plan: TransferPlan) -> list[Segment]:
    """The transfer cut into a grid of segments, marked in any order."""
    (walk,) = plan.groups
    blocks = plan.lists[walk.group].size
    layers = cuts(draw, walk.layers.start, walk.layers.stop)
    positions = cuts(draw, 0, blocks)
    grid = itertools.product(itertools.pairwise(layers), itertools.pairwise(positions))
    segments = [
        segment
        for rows, columns in grid
        for segment in plan.segments(slice(*rows), slice(*columns))
    ]
    return list(draw(st.permutations(segments)))


def cuts(draw: st.DrawFn, start: int, stop: int) -> list[int]:
    """Where to cut a range, its ends included."""
    inside = draw(st.sets(st.integers(start, stop)))
    return sorted({start, stop} | inside)
