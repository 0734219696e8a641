"""The page's rules for what is carried give what kvwire computes, for any caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvwire
from kvwire.errors import ProfileMismatch
from kvwire.kv.canonical import negotiate
from kvwire.kv.geometry import Geometry, describe
from kvwire.kv.plan import PlanSide, Segment, TransferPlan
from kvwire.kv.spec import DTYPE_BYTES
from kvwire.transfers.dedup import digest
from kvwire.transfers.offer import pack_have
from tests.kv.reference import walk_elements
from tests.kv.scenarios import Scenario, scenarios
from tests.protocol import raw_plan as plans


def shares(geometry: Geometry) -> list[plans.Share]:
    """What kvwire says of one side, as the client reads it."""
    encoded: Any = geometry.encoded
    return [plans.Share(*group) for group in encoded]


@settings(max_examples=40)
@given(scenarios(), st.data())
def test_any_two_sides_have_the_plan_of_the_page(
    scenario: Scenario, data: st.DataObject
) -> None:
    """Its digest, and of any box the bytes and each element in its place."""
    blocks = len(scenario.consumer.ids)
    bits = data.draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks))
    plan, _ = scenario.plans({"kv": np.array(bits, np.bool_)})
    producer = shares(scenario.producer.geometry())
    consumer = shares(scenario.consumer.geometry())
    (group,) = groups = plans.carried(producer, consumer, {"kv": plans.bitmap(bits)})
    assert plans.plan_digest(groups) == plan.digest
    layer = data.draw(st.sampled_from(group.layers))
    granule = data.draw(st.integers(0, group.granules - 1))
    box = (
        *(0, layer, data.draw(st.integers(1, group.layers.stop - layer))),
        *(granule, data.draw(st.integers(1, group.granules - granule))),
    )
    assert group.nbytes(box) == plan.nbytes_of(Segment(*box))
    size = plan.groups[0].granule_tokens
    assert [tuple(element) for element in group.elements(box)] == [
        tuple(element)
        for element in walk_elements(plan.groups[0], Segment(*box))
        if group.moved[element.token // size]
    ]


def test_several_groups() -> None:
    """The text of the plan has a group behind the other, and so have its bits."""
    names = ("full", "window")
    caches = []
    for sizes in ((2, 4), (4, 2)):
        groups: Any = {}
        for name, size in zip(names, sizes, strict=True):
            spec = kvwire.KVSpec(
                layers=1, kv_heads=1, head_dim=2, block_tokens=size, dtype="uint8"
            )
            tensor = np.zeros((8, 2, size, 1, 2), np.uint8)
            groups[name] = (spec, [tensor])
        caches.append(kvwire.PagedCache.grouped(groups))
    lists = [caches[0].block_lists({"full": [0, 1], "window": [2]})]
    lists.append(caches[1].block_lists({"full": [3], "window": [4, 5]}))
    ends = [describe(c, ids, 4) for c, ids in zip(caches, lists, strict=True)]
    have = {"window": np.array([True, False])}
    plan = TransferPlan(
        *(caches[0], lists[0], ends[1], PlanSide.PRODUCER), tokens=4, have=have
    )
    packed = {"window": plans.bitmap([True, False])}
    assert (
        plans.plan_digest(plans.carried(shares(ends[0]), shares(ends[1]), packed))
        == plan.digest
    )


def _geometry(tokens: int | None, blocks: int, **spec: Any) -> Geometry:
    fields = {"layers": 2, "kv_heads": 2, "head_dim": 2, "block_tokens": 4} | spec
    pairs = kvwire.KVSpec(**fields).to_pairs()
    order = "layer block kv token head dim"
    return Geometry.decode((("kv", pairs, order, blocks, tokens),))


def test_what_does_not_fit() -> None:
    """Both refuse it, and take it with itself."""
    for other in [
        _geometry(8, 2, head_dim=4),
        _geometry(8, 2, dtype="float16"),
        _geometry(8, 2, components=1),
        _geometry(8, 2, fingerprint="another"),
        _geometry(8, 2, model_layers=3),
        _geometry(8, 2, kv_heads=4),
        _geometry(8, 2, first_layer=2, model_layers=4),
        _geometry(7, 2),
        _geometry(None, 3),
        _geometry(16, 4),
    ]:
        mine = _geometry(8, 2)
        plans.carried(shares(other), shares(other), {})
        with pytest.raises(plans.Misfit):
            plans.carried(shares(mine), shares(other), {})
        with pytest.raises(ProfileMismatch):
            negotiate(mine, other)


@settings(max_examples=20)
@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3),
        st.lists(st.binary(max_size=12), max_size=12),
        min_size=1,
        max_size=3,
    )
)
def test_hashes(hashes: dict[str, list[bytes]]) -> None:
    """A digest of all of them, with what keeps them apart."""
    assert plans.hashes_digest(hashes) == digest(hashes)
    assert plans.hashes_digest({}) == digest({}) == b""


@settings(max_examples=20)
@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_bits_of_have(bits: list[bool]) -> None:
    """The first block is the lowest bit."""
    packed = pack_have({"kv": np.array(bits)})
    assert dict(packed) == ({"kv": plans.bitmap(bits)} if any(bits) else {})


def test_element_types() -> None:
    """The same names and sizes."""
    assert plans.ITEM_BYTES == DTYPE_BYTES
