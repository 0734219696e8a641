"""An outcome says exactly which blocks are here and why the others are not."""

from __future__ import annotations

from copy import copy
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import UsageError
from kvwire.kv.blocks import UNNAMED
from kvwire.kv.landed import Landed
from kvwire.kv.outcome import (
    Outcome,
    Timings,
    join_outcomes,
    nothing_landed,
    outcome_of,
    outcome_of_all,
    timings_of,
)
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import Segment
from kvwire.kv.spec import KVSpec
from tests.kv.reference import Store
from tests.kv.scenarios import NHD, plan_of, segments_of
from tests.support.depth import examples

SPEC = KVSpec(layers=2, kv_heads=1, head_dim=2, block_tokens=4)
BLOCKS = {"full": [5, 3, 8], "window": [8, 5, 1]}


def cache() -> PagedCache:
    return PagedCache.grouped(
        {n: (SPEC, Store(SPEC, 9, NHD).tensors()) for n in BLOCKS}
    )


def landed_of(blocks: dict[str, list[int]] = BLOCKS, **have: list[bool]) -> Landed:
    return Landed(plan_of({name: (SPEC, ids) for name, ids in blocks.items()}, **have))


def bits(*values: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array(values, np.bool_)


def test_each_missing_block_has_the_first_reason_that_names_it() -> None:
    landed = landed_of()
    landed.mark(Segment(0, 0, 2, 0, 1))
    reasons = [
        ("not marked", {"full": bits(1, 1, 0)}),
        ("damaged", {"full": bits(0, 1, 1), "window": bits(0, 0, 1)}),
    ]
    outcome = outcome_of(landed, otherwise="aborted", reasons=reasons)
    assert dict(outcome.missing) == {
        ("full", 3): "not marked",
        ("full", 8): "damaged",
        ("window", 8): "aborted",
        ("window", 5): "aborted",
        ("window", 1): "damaged",
    }


def test_the_outcome_of_everything() -> None:
    """It names what the long way would; what the consumer had is not counted."""
    landed = landed_of({"full": [4, 2], "window": []})
    (segment,) = segments_of(landed.plan, group="full")
    landed.mark(segment)
    outcome = outcome_of(landed, otherwise="")
    assert outcome.complete
    assert outcome.landed.ids("full").tolist() == [4, 2]
    assert not outcome.missing
    assert outcome.missing.reasons == ()
    assert outcome.tokens == {"full": 8, "window": 0}
    assert (outcome.usable_prefix, outcome.usable_tokens) == (2, 8)
    assert outcome.nbytes == 2 * SPEC.block_bytes
    some = landed_of({"full": [4, 2], "window": []}, full=[True, False])
    assert some.plan.digest != landed.plan.digest
    some.mark(segment)
    assert outcome_of(some, otherwise="").nbytes == SPEC.block_bytes


def test_an_outcome_of_everything_is_one_like_any_other() -> None:
    """It is made in another way, which takes less time."""
    plan = landed_of({"full": [4, 2], "window": []}).plan
    timings = timings_of(1.0, 2.0, 3.0, lost_s=4.0)
    outcome = outcome_of_all(plan.template, plan.lists, timings, 2, plan.nbytes)
    values = {one.name: getattr(outcome, one.name) for one in fields(Outcome)}
    assert type(outcome) is Outcome
    assert outcome == replace(outcome) == Outcome(**values)
    assert timings == Timings(queue_s=1.0, wire_s=2.0, commit_s=3.0, lost_s=4.0)
    assert timings.total_s == 10.0
    with pytest.raises(FrozenInstanceError):
        outcome.nbytes = 1  # type: ignore[misc]
    assert copy(outcome).landed is outcome.landed


def test_positions_that_were_never_named_are_no_blocks() -> None:
    """Though they are the only reason why a growing transfer is not complete."""
    landed = landed_of({"full": [4, 0, 1], "window": [2]})
    landed.plan.lists["full"][1:] = UNNAMED
    for group in (0, 1):
        landed.mark(Segment(group, 0, 2, 0, 1))
    outcome = outcome_of(landed, otherwise="aborted")
    assert not outcome.complete
    assert set(outcome.landed) == {("full", 4), ("window", 2)}
    assert (len(outcome.missing), outcome.unnamed) == (0, 2)
    assert outcome.missing.reasons == ("aborted",)
    joined = join_outcomes([outcome, outcome])
    assert set(joined.landed) == set(outcome.landed)
    assert (len(joined.missing), joined.unnamed) == (0, 2)
    assert joined.missing.reasons == ("aborted",)


def test_nothing_landed_without_a_plan() -> None:
    """The peer never came: every block, every layer, one reason."""
    outcome = nothing_landed(cache(), BLOCKS, "no such transfer", tokens=11)
    assert not outcome.complete
    assert not outcome.landed
    assert outcome.landed.groups == ("full", "window")
    assert set(outcome.missing.values()) == {"no such transfer"}
    assert set(outcome.missing) == {(g, n) for g, ids in BLOCKS.items() for n in ids}
    assert outcome.missing.layers(("window", 1)) == (0, 1)
    assert outcome.tokens == {"full": 11, "window": 11}
    assert (outcome.usable_prefix, outcome.nbytes) == (0, 0)
    with pytest.raises(UsageError, match="tokens=99"):
        nothing_landed(cache(), BLOCKS, "no such transfer", tokens=99)


@given(
    st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=3)
)
@settings(max_examples=examples(60), deadline=None, derandomize=True)
def test_a_join_has_landed_what_every_share_has(shares: list[list[bool]]) -> None:
    """Each share is 2 groups x 2 layers x 3 blocks of cells."""
    outcomes = []
    for cells in shares:
        landed = landed_of()
        for index, cell in enumerate(cells):
            group, layer, granule = index // 6, index // 3 % 2, index % 3
            if cell:
                landed.mark(Segment(group, layer, 1, granule, 1))
        outcomes.append(outcome_of(landed, otherwise="lost"))
    joined = join_outcomes(outcomes)
    expected = set.intersection(*(set(outcome.landed) for outcome in outcomes))
    every = {(g, n) for g, ids in BLOCKS.items() for n in ids}
    assert set(joined.landed) == expected
    assert set(joined.missing) == every - expected
    assert joined.complete == (expected == every)
    assert joined.usable_prefix == min(outcome.usable_prefix for outcome in outcomes)
    assert joined.nbytes == sum(outcome.nbytes for outcome in outcomes)


def test_a_join_is_of_the_same_blocks() -> None:
    def outcome(blocks: dict[str, list[int]]) -> Outcome:
        return outcome_of(landed_of(blocks), otherwise="")

    first = outcome(BLOCKS)
    other = outcome({"full": [5, 3, 7], "window": [8, 5, 1]})
    with pytest.raises(UsageError, match="the block lists of group 'full' differ"):
        join_outcomes([first, other])
    with pytest.raises(UsageError, match="one outcome has the groups full, window"):
        join_outcomes([first, replace(first, lists={"full": first.lists["full"]})])
    shorter = replace(first, tokens={"full": 12, "window": 11})
    with pytest.raises(UsageError, match="group 'window' has tokens=12 in one"):
        join_outcomes([first, shorter])
    with pytest.raises(UsageError, match="pass at least one outcome"):
        join_outcomes([])
