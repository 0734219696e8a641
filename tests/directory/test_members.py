"""The table of members against a dictionary, in any order of entries and time."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvwire.directory import Change, ChangeKind, Record, Selector
from kvwire.directory.limits import MEMBERS_MAX
from kvwire.directory.members import Members
from tests.directory.records import record
from tests.support.depth import examples

NUMBERS = st.integers(1, 4)
LEASES = st.sampled_from([1.0, 2.0, 5.0])


class Model(RuleBasedStateMachine):
    """Who is there, and until when, kept the slow way."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.members = Members(Selector.parse("role=decode"))
        self.there: dict[str, tuple[Record, float]] = {}
        # What somebody knows who follows the changes alone.
        self.followed: dict[str, Record] = {}
        self.written: set[str] = set()
        self.lost_at: float | None = None
        self.ignored = 0

    def follow(self, change: Change | None) -> None:
        if change is None:
            return
        key = change.record.key
        match change.kind:
            case ChangeKind.JOINED:
                assert key not in self.followed
            case ChangeKind.CHANGED:
                assert self.followed[key] != change.record
            case ChangeKind.LEFT:
                assert self.followed.pop(key) == change.record
                return
        self.followed[key] = change.record

    @rule(
        number=NUMBERS,
        lease_s=LEASES,
        load=st.integers(0, 2),
        role=st.sampled_from(["decode", "decode", "prefill"]),
    )
    def put(self, number: int, lease_s: float, load: int, role: str) -> None:
        # All of them have one name.
        made = record(number, name="n", role=role, load=float(load), lease_s=lease_s)
        self.follow(self.members.put(made.key, made.encode(), self.now))
        if role == "decode":
            self.there[made.key] = made, self.now + lease_s
            self.written.add(made.key)
        else:
            self.there.pop(made.key, None)

    @rule(number=NUMBERS)
    def renew(self, number: int) -> None:
        key = record(number).key
        if key in self.there:
            known = self.there[key][0]
            change = self.members.put(key, known.encode(), self.now)
            assert change is None
            self.there[key] = known, self.now + known.lease_s
            self.written.add(key)

    @rule(number=NUMBERS, other=NUMBERS, raw=st.sampled_from([b"", b"{}", b"[" * 5000]))
    def put_what_is_none(self, number: int, other: int, raw: bytes) -> None:
        key, another = record(number).key, record(other, role="decode")
        assert self.members.put(key, raw, self.now) is None
        self.ignored += 1
        if number != other:
            assert self.members.put(key, another.encode(), self.now) is None
            self.ignored += 1

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        self.follow(self.members.remove(record(number).key))
        self.there.pop(record(number).key, None)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds
        for change in self.members.expire(self.now):
            assert change.kind is ChangeKind.LEFT
            self.follow(change)
        if self.lost_at is None:
            over = [key for key, (_, until) in self.there.items() if until <= self.now]
            for key in over:
                del self.there[key]

    @rule()
    def lose_the_directory(self) -> None:
        assert self.members.suspend(self.now) is (self.lost_at is None)
        if self.lost_at is None:
            self.lost_at = self.now

    @rule()
    def find_it_again(self) -> None:
        self.members.resume(self.now)
        if self.lost_at is not None:
            for key, (known, until) in self.there.items():
                left_s = until - self.lost_at
                lease_s = known.lease_s if key in self.written else left_s
                self.there[key] = known, self.now + lease_s
            self.written.clear()
        self.lost_at = None

    @invariant()
    def both_know_the_same(self) -> None:
        known = {key: member for key, (member, _) in self.there.items()}
        assert {member.key: member for member in self.members} == known
        assert self.followed == known
        assert len(self.members) == len(known)
        assert self.members.ignored == self.ignored

    @invariant()
    def nobody_is_looked_at_too_late(self) -> None:
        patience_s = self.members.expires_in(self.now)
        if self.lost_at is not None or not self.there:
            assert patience_s is None
        else:
            first = min(until for _, until in self.there.values())
            assert patience_s is not None
            assert self.now + patience_s <= max(first, self.now)


def test_the_table_is_the_model() -> None:
    run_state_machine_as_test(
        Model, settings=settings(max_examples=examples(300), stateful_step_count=40)
    )


def test_the_dead_leave_a_directory_that_comes_and_goes() -> None:
    members, dead = Members(Selector()), record(1, lease_s=5.0)
    members.put(dead.key, dead.encode(), 0.0)
    for second in range(1, 20):
        members.suspend(second - 0.5)
        members.resume(float(second))
        if members.expire(float(second)):
            break
    # A whole lease from the first return, then half of each second counts.
    assert second == 11


def test_of_many_that_leave_each_costs_the_others_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor do members that come and go leave anything behind."""
    members = Members(Selector())
    sorted_anew: list[list[Any]] = []
    monkeypatch.setattr(heapq, "heapify", sorted_anew.append)
    there = [record(number) for number in range(1000)]
    for one in there:
        members.put(one.key, one.encode(), 0.0)
    for one in there:
        members.remove(one.key)
    for _ in range(1000):
        members.put(there[0].key, there[0].encode(), 0.0)
        members.remove(there[0].key)
    assert len(sorted_anew) < 50
    assert len(sorted_anew[-1]) < 100
    assert members.expires_in(0.0) is None
    assert members.expire(100.0) == []


def test_a_full_table_takes_nobody_new() -> None:
    members = Members(Selector())

    def put(number: int, **fields: Any) -> Change | None:
        made = record(number, **fields)
        return members.put(made.key, made.encode(), 0.0)

    assert all(put(number) is not None for number in range(MEMBERS_MAX))
    assert put(MEMBERS_MAX) is None
    assert members.ignored == 1
    assert members.reason == "the directory has more than 4096 members"
    # Who is in it may go on changing.
    assert put(1, load=1.0) == Change(ChangeKind.CHANGED, record(1, load=1.0))
