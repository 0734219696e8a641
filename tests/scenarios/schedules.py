"""Random lives of one transfer: marks, chunks, aborts, cuts, and a link with faults."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from hypothesis import strategies as st

from kvwire_inproc import FaultPlan
from tests.scenarios.world import LAYERS

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
