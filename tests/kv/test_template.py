"""What two caches settle is computed once, and never wrong for another transfer."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvwire import limits
from kvwire.kv.geometry import Geometry, describe, geometry_of
from kvwire.kv.landed import Landed
from kvwire.kv.mapping import Steps
from kvwire.kv.outcome import outcome_of
from kvwire.kv.paged import PagedCache, computed_once
from kvwire.kv.plan import PlanSide, TransferPlan
from kvwire.kv.spec import KVSpec

SPEC = KVSpec(layers=3, kv_heads=2, head_dim=4, block_tokens=4, dtype="float16")


def cache(spec: KVSpec = SPEC) -> PagedCache:
    """Layers that lie apart, as an engine has them."""
    shape = (16, 2, spec.block_tokens, spec.kv_heads, spec.head_dim)
    return PagedCache(spec, [np.zeros(shape, np.float16) for _ in range(spec.layers)])


def said(peer: PagedCache, blocks: int) -> Geometry:
    """What a peer says, as it comes from the wire."""
    fields = describe(peer, peer.block_lists(range(blocks))).encode()
    return geometry_of(tuple(fields))


def plan(here: PagedCache, ids: list[int], peer: Geometry) -> TransferPlan:
    return TransferPlan(here, ids, peer, PlanSide.CONSUMER)


def test_transfers_of_one_size_share_a_template() -> None:
    here, there = cache(), cache()
    first = plan(here, [1, 3], said(there, 2))
    again = plan(here, [5, 9], said(there, 2))
    assert again.template is first.template
    assert again.digest == first.digest
    assert plan(here, [5, 9, 11], said(there, 3)).template is not first.template
    other = TransferPlan(here, [1, 3], said(there, 2), PlanSide.PRODUCER)
    assert other.template is not first.template


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And computed again when it was let go of."""
    monkeypatch.setattr(limits, "KV_TEMPLATES_MAX", 4)
    here = cache()
    made: list[int] = []

    def compute(number: int) -> int:
        made.append(number)
        return number

    for number in (1, 2, 3, 4, 1, 5, 1):
        assert computed_once(here, number, partial(compute, number)) == number
    assert made == [1, 2, 3, 4, 5, 1]
    steps = Steps(plan(here, [1], said(cache(), 1)).groups[0], here.groups["kv"])
    for stop in (1, 2, 3):
        known = steps.of(range(stop))
        assert steps.of(range(stop)) is known
    monkeypatch.setattr(limits, "KV_TEMPLATES_MAX", 1)
    before = steps.of(range(3))
    steps.of(range(1, 2))
    assert steps.of(range(3)) is not before
    monkeypatch.setattr(limits, "KV_TEMPLATE_STEPS_MAX", 0)
    large = steps.of(range(1, 3))
    assert steps.of(range(1, 3)) is not large


def test_the_outcome_of_everything() -> None:
    """It names what the long way would; what the consumer had is not counted."""
    here, peer = cache(), said(cache(), 2)
    whole = Landed(plan(here, [4, 2], peer))
    (segment,) = whole.plan.segments()
    whole.mark(segment)
    outcome = outcome_of(whole, otherwise="")
    assert outcome.complete
    assert outcome.landed.ids().tolist() == [4, 2]
    assert not outcome.missing
    assert outcome.missing.reasons == ()
    assert (outcome.usable_prefix, outcome.usable_tokens) == (2, 8)
    assert outcome.nbytes == 2 * SPEC.block_bytes
    half = TransferPlan(
        here, [4, 2], peer, PlanSide.CONSUMER, have={"kv": np.array([True, False])}
    )
    assert half.digest != whole.plan.digest
    landed = Landed(half)
    landed.mark(segment)
    assert outcome_of(landed, otherwise="").nbytes == SPEC.block_bytes
