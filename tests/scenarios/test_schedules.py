"""Outcomes are exact: whatever happens, to any transfer, over any link.

Random lives of one transfer: marks, chunks, aborts, cuts, and a link with faults.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import kvwire
from kvwire.kv.landed import Landed
from kvwire_inproc import FaultPlan, injected
from tests.scenarios.world import World, world
from tests.support import virtual_time
from tests.support.caches import BLOCKS, LAYERS, Memory, same
from tests.support.depth import examples

# One block of one layer is 16 KiB, so that a mark of a few blocks is several chunks.
SPEC = kvwire.KVSpec(
    layers=LAYERS, kv_heads=4, head_dim=64, block_tokens=8, dtype="float32"
)
LEASE_S = 2.0


Step = Literal["turn", "rest", "cut", "abort by producer", "abort by consumer"]
ABORTS: tuple[Step, ...] = ("abort by producer", "abort by consumer")
# More than the frames of either side's handshake, so that there is a connection.
SPARE = 4


@dataclass(frozen=True)
class Marked:
    """One call of ``ready``."""

    layers: slice
    blocks: slice


@dataclass(frozen=True)
class Schedule:
    """What happens to one transfer, in order."""

    push: bool
    producer_first: bool
    source: list[int]
    target: list[int]
    steps: list[Marked | Step]
    partial: bool
    group_bytes: int | None  # 1 for layer by layer
    faults: FaultPlan

    @property
    def calm(self) -> bool:
        """Whether nothing keeps the transfer from being complete."""
        quiet = self.faults == FaultPlan(seed=self.faults.seed, spare=SPARE)
        plain = all(isinstance(s, Marked) or s in ("turn", "rest") for s in self.steps)
        return quiet and plain and not self.partial


@st.composite
def schedules(draw: st.DrawFn, blocks: int) -> Schedule:
    """Any of them; about every fifth is calm."""
    count = draw(st.integers(1, 6))
    ids = st.permutations(range(blocks)).map(lambda order: order[:count])
    calm = draw(st.integers(0, 4)) == 0
    marks = draw(_marks(count))
    partial = not calm and draw(st.integers(0, 3)) == 0
    if partial:
        marks = marks[: draw(st.integers(0, len(marks) - 1))]
    between: list[Step] = ["turn", "rest"] if calm else ["turn", "turn", "rest", "cut"]
    steps: list[Marked | Step] = []
    for mark in marks:
        steps += [mark, *draw(st.lists(st.sampled_from(between), max_size=3))]
    if not calm and draw(st.integers(0, 3)) == 0:
        who = draw(st.sampled_from(ABORTS))
        steps.insert(draw(st.integers(len(steps) // 2, len(steps))), who)
    return Schedule(
        push=draw(st.booleans()),
        producer_first=draw(st.booleans()),
        source=draw(ids),
        target=draw(ids),
        steps=steps,
        partial=partial,
        group_bytes=draw(st.sampled_from([None, 1])),
        faults=FaultPlan(seed=0, spare=SPARE) if calm else draw(_faults()),
    )


@st.composite
def _marks(draw: st.DrawFn, blocks: int) -> list[Marked]:
    """Chunked prefill: chunk by chunk, each in some order and grouping of layers."""
    cuts = draw(st.sets(st.integers(1, blocks - 1))) if blocks > 1 else set()
    edges = [0, *sorted(cuts), blocks]
    marks: list[Marked] = []
    for start, stop in pairwise(edges):
        splits = draw(st.sets(st.integers(1, LAYERS - 1)))
        layers = [0, *sorted(splits), LAYERS]
        parts = [slice(*pair) for pair in pairwise(layers)]
        marks += [Marked(p, slice(start, stop)) for p in draw(st.permutations(parts))]
    return marks


@st.composite
def _faults(draw: st.DrawFn) -> FaultPlan:
    """Each kind rare enough that frames get through, or absent."""
    chance = st.sampled_from([0.0, 0.0, 0.0, 0.01, 0.05])
    rare = st.sampled_from([0.0, 0.0, 0.01])
    return FaultPlan(
        seed=draw(st.integers(0, 2**16)),
        drop=draw(rare),
        delay=draw(chance),
        reorder=draw(rare),
        duplicate=draw(rare),
        corrupt=draw(chance),
        stall=draw(rare),
        kill=draw(rare),
        stall_after=SPARE,
        kill_after=SPARE,
        spare=SPARE,
    )


@settings(max_examples=examples(100))
@given(schedules(BLOCKS))
def test_whatever_happens_the_outcome_is_exact(schedule: Schedule) -> None:
    """Landed blocks hold the producer's bytes, the others say why, no other is touched.

    Both sides end, agree as far as they can know, and leave nothing behind.
    """

    async def main() -> None:
        async with world(
            "inproc", lease_s=LEASE_S, chunk_bytes=65_536, ping_interval_s=0.5
        ) as w:
            w.source, w.target = Memory(SPEC), Memory(SPEC)
            w.source.stamp(range(BLOCKS))
            await check_life(w, schedule)

    with injected(schedule.faults):
        virtual_time.run(main())


@pytest.mark.slow
def test_a_resumed_transfer_that_takes_all_for_landed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_of_it(landed: Landed, boxes: object) -> None:
        landed.mark_granules(0, np.ones(landed.plan.groups[0].granules, np.bool_))

    monkeypatch.setattr(Landed, "mark_boxes", all_of_it)
    test: Any = test_whatever_happens_the_outcome_is_exact
    once = settings(max_examples=500, phases=[Phase.generate], derandomize=True)
    with pytest.raises((AssertionError, ExceptionGroup)):
        once(given(schedules(BLOCKS))(test.hypothesis.inner_test))()


async def check_life(w: World, schedule: Schedule) -> None:
    out, inc = await _both_ends(w, schedule)
    for step in schedule.steps:
        match step:
            case Marked(layers, blocks):
                out.ready(layers, blocks)
            case "turn":
                await asyncio.sleep(0)
            case "rest":
                await virtual_time.pass_time(0.02)
            case "cut":
                w.cut()
            case "abort by producer":
                out.abort("by the producer")
            case "abort by consumer":
                inc.abort("by the consumer")
    out.finish(partial=schedule.partial)
    async with asyncio.timeout(300):
        produced, outcome = await out, await inc
        await out.drained()
        check_outcome(w, schedule, outcome)
        # The producer's blocks have a new owner, and later the consumer's.
        w.source.stamp(range(BLOCKS), salt=9)
        check_outcome(w, schedule, outcome, salted=True)
        await inc.drained()
    for tensor in w.target.tensors:
        tensor[:] = 7.0
    await virtual_time.pass_time(3 * LEASE_S)
    assert all((tensor == 7.0).all() for tensor in w.target.tensors), "a late write"
    assert outcome.complete or not produced.complete
    consumed = set(outcome.landed.ids().tolist())
    pairs = dict(zip(schedule.source, schedule.target, strict=True))
    assert {pairs[block] for block in produced.landed.ids().tolist()} <= consumed
    assert all(reason for reason in produced.missing.values())
    if schedule.calm:
        assert outcome.complete
        assert produced.complete
        assert outcome.nbytes == len(schedule.source) * SPEC.block_bytes


async def _both_ends(
    w: World, schedule: Schedule
) -> tuple[kvwire.Outgoing, kvwire.Incoming]:
    def produce() -> kvwire.Outgoing:
        grouping = schedule.group_bytes
        return w.produce("t", schedule.source, push=schedule.push, group_bytes=grouping)

    def consume() -> kvwire.Incoming:
        return w.consume("t", schedule.target, push=schedule.push)

    if schedule.producer_first:
        out = produce()
        await virtual_time.pass_time(0.02)
        return out, consume()
    inc = consume()
    await virtual_time.pass_time(0.02)
    return produce(), inc


def check_outcome(
    w: World, schedule: Schedule, outcome: kvwire.Outcome, *, salted: bool = False
) -> None:
    """What the consumer was told is what is in its memory."""
    source = w.source
    if salted:
        # What the blocks held before they were reused.
        source = Memory(SPEC)
        source.stamp(range(BLOCKS))
    landed = set(outcome.landed.ids().tolist())
    pairs = list(zip(schedule.source, schedule.target, strict=True))
    for block, place in pairs:
        assert (place in landed) != (("kv", place) in outcome.missing)
        if place in landed:
            assert same(source, [block], w.target, [place])
        else:
            assert outcome.missing["kv", place]
            lost = outcome.missing.layers(("kv", place))
            here = [layer for layer in range(LAYERS) if layer not in lost]
            assert lost
            assert same(source, [block], w.target, [place], layers=here)
    leading = [place in landed for _, place in pairs]
    prefix = leading.index(False) if False in leading else len(leading)
    assert outcome.usable_prefix == prefix
    assert outcome.usable_tokens == prefix * SPEC.block_tokens
    assert outcome.complete == all(leading)
    assert w.target.free(set(range(BLOCKS)) - set(schedule.target))
