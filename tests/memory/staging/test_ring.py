"""A ring never gives a slot that is in use, and never loses one."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvwire.memory.staging.ring import Ring, SlotState

SLOTS = 3


class Slots(RuleBasedStateMachine):
    """The ring beside the plainest model of it: a set for each use."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(SLOTS)
        self.filling: set[int] = set()
        self.full: set[int] = set()

    @precondition(lambda self: self.ring.free)
    @rule()
    def take(self) -> None:
        slot = self.ring.take()
        assert slot not in self.filling | self.full
        self.filling.add(slot)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def filled(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.filling)))
        self.ring.filled(slot)
        self.filling.remove(slot)
        self.full.add(slot)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def dropped(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.filling)))
        self.ring.dropped(slot)
        self.filling.remove(slot)

    @precondition(lambda self: self.full)
    @rule(data=st.data())
    def emptied(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.full)))
        self.ring.emptied(slot)
        self.full.remove(slot)

    @rule(slot=st.integers(0, SLOTS - 1))
    def wrong_steps_are_refused(self, slot: int) -> None:
        if slot not in self.full:
            with pytest.raises(AssertionError):
                self.ring.emptied(slot)
        if slot not in self.filling:
            with pytest.raises(AssertionError):
                self.ring.filled(slot)
            with pytest.raises(AssertionError):
                self.ring.dropped(slot)

    @invariant()
    def every_slot_is_somewhere(self) -> None:
        assert self.ring.free == SLOTS - len(self.filling) - len(self.full)
        for slot in range(SLOTS):
            in_use = slot in self.filling, slot in self.full
            expected = {
                (True, False): SlotState.FILLING,
                (False, True): SlotState.FULL,
                (False, False): SlotState.FREE,
            }
            assert self.ring.use(slot) is expected[in_use]


TestSlots = Slots.TestCase


def test_slots_are_used_in_turn() -> None:
    """The slot that has rested longest is next, so none is used up before another."""
    ring = Ring(3)
    order = []
    for _ in range(6):
        slot = ring.take()
        order.append(slot)
        ring.filled(slot)
        ring.emptied(slot)
    assert order == [0, 1, 2, 0, 1, 2]
    assert len(ring) == 3
