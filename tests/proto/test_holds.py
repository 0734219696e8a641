"""Memory is free when it is retired and nothing holds it, and at no other time."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvwire.proto.holds import Holds
from kvwire.types import BufferId
from tests.support.debug import needs_asserts


def test_a_buffer_drains_with_its_last_hold() -> None:
    """Retired while held: not before the last operation has ended."""
    holds = Holds()
    buffer = holds.new()
    holds.take(buffer)
    holds.take(buffer)
    for _ in range(2):
        holds.retire(buffer)
    holds.drop(buffer)
    assert holds.drained == []
    assert holds.held(buffer)
    holds.drop(buffer)
    assert holds.drained == [buffer]
    assert len(holds) == 0


def test_a_hold_that_ends_with_the_need_for_its_buffer() -> None:
    """At once if it was the last one, and else with that."""
    holds = Holds()
    one, two = holds.new(), holds.new()
    for buffer in (one, two, two):
        holds.take(buffer)
    for buffer in (one, two):
        holds.drop_and_retire(buffer)
    assert holds.drained == [one]
    assert holds.retired == {two}
    holds.drop(two)
    assert holds.drained == [one, two]
    assert len(holds) == 0


@needs_asserts
def test_our_own_mistakes_are_noticed() -> None:
    """A hold on what is given back, and a hold that ends twice."""
    holds = Holds()
    buffer = holds.new()
    with pytest.raises(AssertionError, match="twice"):
        holds.drop(buffer)
    holds.take(buffer)
    holds.retire(buffer)
    with pytest.raises(AssertionError, match="retired"):
        holds.take(buffer)


class HoldsMachine(RuleBasedStateMachine):
    """Any calls in any order, beside a model of plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = Holds()
        self.counts: dict[BufferId, int] = {}
        self.retired: set[BufferId] = set()
        self.drained: set[BufferId] = set()

    def pick(self, data: st.DataObject, among: list[BufferId]) -> BufferId:
        return data.draw(st.sampled_from(among))

    @rule()
    def new(self) -> None:
        buffer = self.holds.new()
        assert buffer not in self.counts, "a name was used twice"
        self.counts[buffer] = 0

    @precondition(lambda self: set(self.counts) - self.retired)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        buffer = self.pick(data, sorted(set(self.counts) - self.retired))
        self.holds.take(buffer)
        self.counts[buffer] += 1

    @precondition(lambda self: any(self.counts.values()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        buffer = self.pick(data, [b for b, count in self.counts.items() if count])
        self.holds.drop(buffer)
        self.counts[buffer] -= 1

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        buffer = self.pick(data, sorted(self.counts))
        self.holds.retire(buffer)
        self.retired.add(buffer)

    @invariant()
    def drained_exactly_what_is_free(self) -> None:
        free = {b for b in self.retired if not self.counts[b]}
        fresh = self.holds.drained
        assert len(fresh) == len(set(fresh)), "drained twice"
        assert not self.drained & set(fresh), "drained twice"
        self.drained |= set(fresh)
        fresh.clear()
        assert self.drained == free
        assert len(self.holds) == len(self.counts) - len(free)
        assert self.holds.retired == self.retired - free
        held = {b for b, count in self.counts.items() if count}
        assert {b for b in self.counts if self.holds.held(b)} == held


TestHolds = HoldsMachine.TestCase
