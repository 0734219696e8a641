"""Shadows of caches: what lands in one comes out of the other, row by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvwire.errors import UsageError
from kvwire.kv.coded_cache import CodedCache
from kvwire.kv.floats import FLOATS, as_floats, put_floats
from kvwire.kv.geometry import describe
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import PlanSide, TransferPlan
from kvwire.kv.row_codec import ROW_CODECS, RowCodec
from kvwire.kv.spec import KVSpec
from kvwire.memory.copy import copy
from tests.kv.reference import STORED_AS, Element
from tests.kv.scenarios import End, Scenario, scenarios, segments_of
from tests.support.depth import examples


class Coded:
    """One end of a scenario, and the shadow of its blocks."""

    def __init__(self, end: End, codec: RowCodec) -> None:
        cache = end.store.cache()
        self.coded = CodedCache(cache, cache.block_lists(end.ids), codec)
        self.tokens = end.tokens
        shadow = self.coded.cache
        self.geometry = describe(shadow, self.coded.lists, end.tokens)

    def plan(self, peer: Coded, side: PlanSide) -> TransferPlan:
        """What it does with a peer."""
        return TransferPlan(
            self.coded.cache, self.coded.lists, peer.geometry, side, tokens=self.tokens
        )


def fill(end: End) -> None:
    """Stamp every element with a number of its type."""
    dtype = end.store.spec.dtype
    for element in end.store.elements(len(end.ids)):
        raw, at = end.store.place(end.ids, element)
        raw[at] = stored([element.stamp], dtype)[0]


def stored(numbers: list[float], dtype: str) -> np.ndarray:
    """Numbers as a cache of this type keeps them."""
    kept = np.array(numbers, np.float32)
    if dtype not in FLOATS:
        return kept.astype(STORED_AS[dtype])
    into = np.empty(kept.size * np.dtype(STORED_AS[dtype]).itemsize, np.uint8)
    put_floats(kept, dtype, into)
    return into.view(STORED_AS[dtype])


def expected(element: Element, spec: KVSpec, codec: RowCodec) -> np.ndarray:
    """A row that was encoded and decoded by itself."""
    stamps = [element._replace(dim=dim).stamp for dim in range(spec.head_dim)]
    row = stored([float(stamp) for stamp in stamps], spec.dtype)
    if spec.dtype not in FLOATS:
        return row
    encoded = np.empty((1, codec.row_bytes(spec.head_dim)), np.uint8)
    codec.encode(as_floats(row.view(np.uint8), spec.dtype)[None], encoded)
    return stored(codec.decode(encoded, spec.head_dim)[0].tolist(), spec.dtype)


@settings(max_examples=examples(80), deadline=None)
@given(scenarios(), st.sampled_from(list(ROW_CODECS.values())), st.data())
def test_rows_come_back_where_they_belong(
    scenario: Scenario, codec: RowCodec, data: st.DataObject
) -> None:
    """Other layouts, block sizes, shards and stages; and a part that never lands."""
    here, there = scenario.producer, scenario.consumer
    assume(here.store.spec.dtype in FLOATS)
    fill(here)
    producer, consumer = Coded(here, codec), Coded(there, codec)
    plans = (
        producer.plan(consumer, PlanSide.PRODUCER),
        consumer.plan(producer, PlanSide.CONSUMER),
    )
    assert plans[0].digest == plans[1].digest
    spec = here.store.spec
    producer.coded.encode("kv", range(spec.layers), range(len(here.ids)), copy)
    (walk,) = plans[0].groups
    landed = data.draw(st.sampled_from(walk.layers))
    (segment,) = segments_of(plans[0], landed)
    copy(plans[0].fragments(segment), plans[1].fragments(segment))
    wanted = plans[1].maps[0].wanted
    consumer.coded.decode(
        walk, segment.layer_range, segment.granule_slice, wanted, copy
    )
    for element in there.store.elements(len(there.ids)):
        raw, at = there.store.place(there.ids, element)
        carried = element.token < walk.granules * walk.granule_tokens
        if element.layer == landed and element.head in walk.heads and carried:
            assert raw[at] == expected(element, spec, codec)[element.dim], element
        else:
            assert raw[at] == 0, element


def test_groups_without_floats_keep_their_bytes() -> None:
    tokens = KVSpec(layers=1, kv_heads=1, head_dim=4, block_tokens=2, dtype="float16")
    state = KVSpec(
        layers=1,
        kv_heads=1,
        head_dim=10,
        block_tokens=1,
        dtype="uint8",
        components=1,
        kind="state",
    )
    values = np.arange(30, dtype=np.uint8).reshape(3, 10)
    cache = PagedCache.grouped(
        {
            "attention": (tokens, [np.ones((3, 2, 2, 1, 4), np.float16)]),
            "mamba": (state, [values.reshape(3, 1, 1, 1, 10)]),
        }
    )
    lists = cache.block_lists({"attention": [2, 0], "mamba": [1]})
    coded = CodedCache(cache, lists, ROW_CODECS["int8"])
    specs = {name: group.spec for name, group in coded.cache.groups.items()}
    assert (specs["attention"].head_dim, specs["attention"].dtype) == (8, "uint8")
    assert specs["attention"].fingerprint == "codec=int8 of float16"
    assert specs["mamba"] == state
    coded.encode("mamba", range(1), range(1), copy)
    before, values[1] = values[1].copy(), 0
    plan = TransferPlan(
        coded.cache, coded.lists, describe(coded.cache, coded.lists), PlanSide.CONSUMER
    )
    coded.decode(plan.groups[1], range(1), slice(0, 1), np.ones(1, np.bool_), copy)
    np.testing.assert_array_equal(values[1], before)


def test_a_cache_without_floats_is_refused() -> None:
    spec = KVSpec(layers=1, kv_heads=1, head_dim=4, block_tokens=2, dtype="int8")
    cache = PagedCache(spec, [np.zeros((3, 2, 2, 1, 4), np.int8)])
    with pytest.raises(
        UsageError, match=r"codec='fp8': it needs a cache whose elements are"
    ):
        CodedCache(cache, cache.block_lists([1]), ROW_CODECS["fp8"])
