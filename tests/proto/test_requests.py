"""Numbers given once, one end for each request, deadlines that are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import (
    ConnectionLost,
    FlowControlViolation,
    UnexpectedFrame,
    UsageError,
)
from kvwire.limits import REQUESTS_MAX
from kvwire.proto.records import ChunkSet, RequestRecord
from kvwire.proto.requests import REQUEST_ID_MAX
from kvwire.proto.state import FIRST_STATE, RequestInput, RequestKind, RequestStage
from kvwire.types import RequestId, Role
from tests.proto.flowing import Side

both_roles = pytest.mark.parametrize("role", list(Role))


def first_of(role: Role) -> int:
    return 1 if role is Role.CLIENT else 2


@pytest.mark.rule("KVW-RQ-02", "keeps")
@both_roles
def test_the_peer_counts_as_well(role: Role) -> None:
    """In steps of two, from its own first number."""
    side = Side(role=role)
    first = first_of(role.other)
    served = [side.served(first + 2 * count) for count in range(4)]
    assert [side.requests.find(first + 2 * count) for count in range(4)] == served


@pytest.mark.rule("KVW-RQ-02", "breaks")
def test_any_other_number() -> None:
    """Ours, an old one, one left out, the largest: only 4 follows 2."""
    for wire_id in [0, 1, 2, 3, 5, 6, 8, 2**32 - 1, 2**32 - 2]:
        side = Side()
        side.served(2)
        with pytest.raises(UnexpectedFrame, match="next one is 4") as caught:
            side.requests.admit(wire_id)
        assert caught.value.rule == "KVW-RQ-02"
        assert side.requests.admit(4) == 4


@pytest.mark.rule("KVW-RQ-04", "keeps")
@both_roles
def test_a_number_of_the_past_is_late(role: Role) -> None:
    """Frames for a request that is over find nothing, and that is no error."""
    side = Side(role=role)
    ours, theirs = side.request(RequestKind.PUT), side.served(first_of(role.other))
    for request in (ours, theirs):
        side.requests.fail(request, ConnectionLost("over"), code=None)
        assert side.requests.find(request.wire_id) is None


@pytest.mark.rule("KVW-RQ-04", "breaks")
def test_a_number_that_never_was() -> None:
    """Whoever should have given it."""
    for wire_id in [0, 3, 4, 5, 6, 2**31, 2**32 - 1, 2**32 - 2]:
        side = Side()
        side.request(RequestKind.PUT)
        side.served(2)
        with pytest.raises(UnexpectedFrame, match="never started") as caught:
            side.requests.find(wire_id)
        assert caught.value.rule == "KVW-RQ-04"


@pytest.mark.rule("KVW-RQ-03", "keeps")
@pytest.mark.rule("KVW-RQ-03", "breaks")
def test_how_many_the_peer_may_have_open() -> None:
    """Twice what it may start, for gets whose end it has seen before we have."""
    side = Side(role=Role.SERVER)
    for count in range(2 * REQUESTS_MAX):
        side.served(2 * count + 1)
    following = 4 * REQUESTS_MAX + 1
    with pytest.raises(FlowControlViolation, match="KVW-RQ-03"):
        side.requests.admit(following)
    last = side.requests.find(1)
    assert last is not None
    side.requests.fail(last, ConnectionLost("over"), code=None)
    assert side.requests.admit(following) == following
    side.request(RequestKind.PUT)


def test_how_many_this_side_may_have_open() -> None:
    """Its own, numbered or waiting for a message; what it serves does not count."""
    side = Side()
    side.served(2)
    waiting = RequestRecord(
        kind=RequestKind.RECV, buffer=None, nbytes=5, state=RequestStage.POSTED
    )
    side.requests.start(waiting)
    for _ in range(REQUESTS_MAX - 2):
        side.request(RequestKind.PUT)
    last = side.request(RequestKind.PUT)
    for kind in (RequestKind.PUT, RequestKind.RECV):
        with pytest.raises(UsageError, match=f"{REQUESTS_MAX} requests are open"):
            side.request(kind)
    assert len(side.requests) == REQUESTS_MAX + 1
    side.requests.fail(last, ConnectionLost("over"), code=None)
    side.request(RequestKind.PUT)


def test_numbers_are_used_up_some_day() -> None:
    """They are 32 bits, and never the same twice."""
    side = Side()
    side.requests._next_id = REQUEST_ID_MAX
    assert side.request(RequestKind.PUT).wire_id == REQUEST_ID_MAX
    for kind in (RequestKind.PUT, RequestKind.RECV):
        with pytest.raises(UsageError, match="reconnect"):
            side.request(kind)


@pytest.mark.rule("KVW-RQ-01", "breaks")
def test_a_step_that_does_not_exist() -> None:
    """It names the request, its state and what came."""
    for kind in RequestKind:
        request = RequestRecord(
            kind=kind,
            wire_id=RequestId(7),
            buffer=None,
            nbytes=1,
            state=FIRST_STATE[kind],
        )
        assert request.state is FIRST_STATE[kind]
        wrong = RequestInput.CONFIRMED
        if kind is RequestKind.OPEN_WINDOW:
            wrong = RequestInput.MOVED
        with pytest.raises(
            UnexpectedFrame, match=rf"request 7: {wrong.value} while"
        ) as caught:
            request.advance(wrong)
        assert caught.value.rule == "KVW-RQ-01"
        assert request.state is FIRST_STATE[kind]


# --- deadlines


def test_a_request_without_a_deadline_never_expires() -> None:
    """Nor does one whose deadline was met."""
    side = Side()
    side.request(RequestKind.PUT)
    first = side.request(RequestKind.PUT, deadline=5.0)
    side.requests.fail(first, ConnectionLost("over"), code=None)
    assert side.requests.next_deadline is None
    assert side.requests.expire(1e9) == []


def test_deadlines_of_the_past_are_forgotten() -> None:
    """A million requests that end in time leave no million entries."""
    side = Side()
    keep = [side.request(RequestKind.PUT, deadline=1e9 + count) for count in range(10)]
    for count in range(3 * REQUESTS_MAX):
        request = side.request(RequestKind.PUT, deadline=1e6 + count)
        side.requests.fail(request, ConnectionLost("over"), code=None)
        side.done()
        assert len(side.requests._deadlines) <= REQUESTS_MAX
    assert side.requests.expire(1e9 + 4) == keep[:5]
    assert side.requests.next_deadline == 1e9 + 5


# --- which chunks have come


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40))))
def test_chunks_that_came_are_a_set(steps: list[tuple[bool, int]]) -> None:
    """In any order, with any repetitions, from any start; what was lost is new."""
    seen, model = ChunkSet(), set[int]()
    for lost, number in steps:
        if lost and number in model:
            seen.forget(number)
            model.remove(number)
        else:
            assert seen.note(number) is (number not in model)
            model.add(number)


def test_chunks_in_order_cost_no_memory() -> None:
    """A size that the peer announces costs nothing; what came out of order is kept."""
    seen = ChunkSet()
    assert all(seen.note(number) for number in range(1000))
    assert not seen._beyond
    assert seen.note(10**12)
    assert seen._beyond == {10**12}
    assert seen.note(1001)
    assert seen.note(1000)
    assert seen._beyond == {10**12}
