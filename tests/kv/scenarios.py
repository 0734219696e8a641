"""Random transfers: a model, and two sides that keep shares of it in any way at all."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from kvwire.kv.blocks import Bits
from kvwire.kv.geometry import Geometry, describe
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import PlanSide, Segment, TransferPlan
from kvwire.kv.spec import KVSpec
from tests.kv.reference import STORED_AS, Store, plain_shape, shapes

# Block sizes of producer and consumer: equal, P < D, P > D, and neither divides.
BLOCK_TOKENS = [(1, 1), (2, 2), (4, 4), (2, 4), (1, 3), (4, 2), (6, 1), (3, 2), (4, 6)]


NHD = plain_shape("block kv token head dim")


@dataclass
class End:
    """One side of a transfer."""

    store: Store
    ids: list[int]
    tokens: int | None

    def geometry(self) -> Geometry:
        """What it tells the peer, as it comes off the wire."""
        cache = self.store.cache()
        lists = cache.block_lists(self.ids)
        return Geometry.decode(describe(cache, lists, self.tokens).encoded)


@dataclass
class Scenario:
    """Two ends and the plans they make of each other."""

    producer: End
    consumer: End

    def plans(
        self, have: Mapping[str, Bits] | None = None
    ) -> tuple[TransferPlan, TransferPlan]:
        """The producer's and the consumer's plan."""
        return (
            self._plan(self.producer, self.consumer, PlanSide.PRODUCER, have),
            self._plan(self.consumer, self.producer, PlanSide.CONSUMER, have),
        )

    def _plan(
        self, end: End, peer: End, side: PlanSide, have: Mapping[str, Bits] | None
    ) -> TransferPlan:
        return TransferPlan(
            end.store.cache(),
            end.ids,
            peer.geometry(),
            side,
            tokens=end.tokens,
            have=have,
        )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Any two shares of one model that have something in common."""
    layers = draw(st.integers(1, 3))
    heads = draw(st.sampled_from([1, 2, 4]))
    common = {
        "head_dim": draw(st.integers(1, 3)),
        "dtype": draw(st.sampled_from(sorted(STORED_AS))),
        "components": draw(st.sampled_from([1, 2])),
    }
    tokens = draw(st.integers(1, 9))
    sizes = draw(st.sampled_from(BLOCK_TOKENS))
    ends = []
    for size in sizes:
        spec = draw(_shares(layers, heads, size, common))
        blocks = -(-tokens // size)
        pool = blocks + draw(st.integers(0, 2))
        ids = draw(st.permutations(range(pool)))[:blocks]
        store = Store(spec, pool, draw(shapes(spec)))
        ends.append(End(store, list(ids), tokens))
    if draw(st.booleans()):
        ends[draw(st.integers(0, 1))].tokens = None
    here, there = ends[0].store.spec, ends[1].store.spec
    assume(set(here.heads) & set(there.heads))
    assume(set(here.layer_indices) & set(there.layer_indices))
    return Scenario(*ends)


@st.composite
def _shares(
    draw: st.DrawFn, layers: int, heads: int, size: int, common: dict[str, object]
) -> KVSpec:
    """A pipeline stage and tensor-parallel shard of the model."""
    parts = draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]))
    replicas = draw(st.sampled_from([1, 1, 2]))
    first = draw(st.integers(0, layers - 1))
    fields: dict[str, object] = {
        "layers": draw(st.integers(1, layers - first)),
        "first_layer": first,
        "model_layers": layers,
        "kv_heads": heads // parts,
        "model_kv_heads": heads,
        "shard": (draw(st.integers(0, parts * replicas - 1)), parts * replicas),
        "block_tokens": size,
    }
    return KVSpec(**fields | common)  # type: ignore[arg-type]


def segments_of(
    plan: TransferPlan,
    layers: int | slice | None = None,
    blocks: int | slice | None = None,
    group: str | None = None,
) -> tuple[Segment, ...]:
    """The segments of a mark: layers by the model's index, blocks by position."""
    found = []
    for name in plan.indices if group is None else [group]:
        index = plan.group_index(name)
        held = plan.maps[index].memory.spec.layer_indices
        named = _numbers(layers, held)
        rows = range(named.start - held.start, named.stop - held.start)
        columns = _numbers(blocks, range(plan.lists[name].size))
        found.append(plan.marked(index, rows, columns))
    return tuple(segment for segment in found if segment is not None)


def _numbers(which: int | slice | None, held: range) -> range:
    if isinstance(which, int):
        return range(which, which + 1)
    return held if which is None else range(which.start, which.stop)


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
        for segment in segments_of(plan, slice(*rows), slice(*columns))
    ]
    return list(draw(st.permutations(segments)))


def cuts(draw: st.DrawFn, start: int, stop: int) -> list[int]:
    """Where to cut a range, its ends included."""
    inside = draw(st.sets(st.integers(start, stop)))
    return sorted({start, stop} | inside)


def plan_of(
    groups: dict[str, tuple[KVSpec, list[int]]], **have: list[bool]
) -> TransferPlan:
    """A consumer's plan; the producer has the same."""
    cache = PagedCache.grouped(
        {n: (s, Store(s, 9, NHD).tensors()) for n, (s, _) in groups.items()}
    )
    blocks = {name: ids for name, (_, ids) in groups.items()}
    peer = describe(cache, cache.block_lists(blocks))
    bits = {name: np.array(held, np.bool_) for name, held in have.items()}
    return TransferPlan(cache, blocks, peer, PlanSide.CONSUMER, have=bits)
