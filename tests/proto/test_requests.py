"""Numbers given once, one end for each request, deadlines that are kept."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvwire.errors import (
    ConnectionLost,
    DeadlineExceeded,
    FlowControlViolation,
    PeerCancelled,
    UnexpectedFrame,
    UsageError,
    WireCode,
)
from kvwire.limits import REQUEST_ID_MAX, REQUESTS_MAX
from kvwire.proto.events import RequestDone
from kvwire.proto.framing import Framing
from kvwire.proto.holds import Holds
from kvwire.proto.outbox import Outbox
from kvwire.proto.requests import SERVING, RequestRecord, RequestTable
from kvwire.proto.state import FIRST_STATE, RequestInput, RequestKind
from kvwire.types import BufferId, RequestId, Role
from kvwire.wire.control import Body, Fail, Fin, decode_body
from kvwire.wire.header import decode_header

both_roles = pytest.mark.parametrize("role", list(Role))


@dataclass
class Table:
    """The requests of one side, and what they say."""

    requests: RequestTable
    outbox: Outbox
    holds: Holds

    def said(self) -> list[tuple[int, Body]]:
        frames = []
        while self.outbox.frames:
            raw, body = self.outbox.frames.popleft()
            header = decode_header(raw)
            frames.append((header.request, decode_body(header.type, body)))
        return frames

    def done(self) -> list[RequestDone]:
        events = self.outbox.events.copy()
        self.outbox.events.clear()
        return [event for event in events if isinstance(event, RequestDone)]

    def request(
        self, kind: RequestKind, *, deadline: float | None = None, nbytes: int = 5
    ) -> RequestRecord:
        return RequestRecord(
            kind=kind,
            wire_id=None,
            buffer=self.holds.new(),
            nbytes=nbytes,
            deadline=deadline,
        )

    def started(
        self, kind: RequestKind = RequestKind.PUT, *, deadline: float | None = None
    ) -> RequestRecord:
        request = self.request(kind, deadline=deadline)
        self.requests.start(request)
        return request

    def served(
        self, wire_id: int, kind: RequestKind = RequestKind.SERVE_GET
    ) -> RequestRecord:
        request = self.request(kind)
        request.wire_id = self.requests.admit(wire_id)
        self.requests.serve(request)
        return request


def table(role: Role = Role.CLIENT) -> Table:
    outbox, holds = Outbox(Framing()), Holds()
    return Table(RequestTable(role, outbox, holds), outbox, holds)


def first_of(role: Role) -> int:
    return 1 if role is Role.CLIENT else 2


@pytest.mark.rule("KVW-RQ-02", "keeps")
@both_roles
def test_the_peer_counts_as_well(role: Role) -> None:
    """In steps of two, from its own first number."""
    side = table(role)
    first = first_of(role.other)
    served = [side.served(first + 2 * count) for count in range(4)]
    assert [side.requests.find(first + 2 * count) for count in range(4)] == served


@pytest.mark.rule("KVW-RQ-02", "breaks")
def test_any_other_number() -> None:
    """Ours, an old one, one left out, the largest: only 4 follows 2."""
    for wire_id in [0, 1, 2, 3, 5, 6, 8, 2**32 - 1, 2**32 - 2]:
        side = table(Role.CLIENT)
        side.served(2)
        with pytest.raises(UnexpectedFrame, match="next one is 4") as caught:
            side.requests.admit(wire_id)
        assert caught.value.rule == "KVW-RQ-02"
        assert side.requests.admit(4) == 4


@pytest.mark.rule("KVW-RQ-04", "keeps")
@both_roles
def test_a_number_of_the_past_is_late(role: Role) -> None:
    """Frames for a request that is over find nothing, and that is no error."""
    side = table(role)
    ours, theirs = side.started(), side.served(first_of(role.other))
    for request in (ours, theirs):
        side.requests.fail(request, ConnectionLost("over"), tell=None)
        assert request.wire_id is not None
        assert side.requests.find(request.wire_id) is None


@pytest.mark.rule("KVW-RQ-04", "breaks")
def test_a_number_that_never_was() -> None:
    """Whoever should have given it."""
    for wire_id in [0, 3, 4, 5, 6, 2**31, 2**32 - 1, 2**32 - 2]:
        side = table(Role.CLIENT)
        side.started()
        side.served(2)
        with pytest.raises(UnexpectedFrame, match="never was") as caught:
            side.requests.find(wire_id)
        assert caught.value.rule == "KVW-RQ-04"


@pytest.mark.rule("KVW-RQ-03", "keeps")
@pytest.mark.rule("KVW-RQ-03", "breaks")
def test_how_many_the_peer_may_have_open() -> None:
    """Twice what it may start, for gets whose end it has seen before we have."""
    side = table(Role.SERVER)
    for count in range(2 * REQUESTS_MAX):
        side.served(2 * count + 1)
    following = 4 * REQUESTS_MAX + 1
    with pytest.raises(FlowControlViolation, match="KVW-RQ-03"):
        side.requests.admit(following)
    last = side.requests.find(1)
    assert last is not None
    side.requests.fail(last, ConnectionLost("over"), tell=None)
    assert side.requests.admit(following) == following
    side.requests.check_room()


def test_how_many_this_side_may_have_open() -> None:
    """Its own, numbered or waiting for a message; what it serves does not count."""
    side = table()
    side.served(2)
    waiting = side.request(RequestKind.RECV)
    side.requests.post(waiting)
    for _ in range(REQUESTS_MAX - 2):
        side.started()
    side.requests.check_room()
    last = side.started()
    with pytest.raises(UsageError, match=f"{REQUESTS_MAX} requests are open"):
        side.requests.check_room()
    side.requests.fail(last, ConnectionLost("over"), tell=None)
    side.requests.check_room()
    assert len(side.requests) == REQUESTS_MAX


def test_numbers_are_used_up_some_day() -> None:
    """They are 32 bits, and never the same twice."""
    side = table()
    side.requests._next_id = REQUEST_ID_MAX
    side.requests.check_room()
    assert side.started().wire_id == REQUEST_ID_MAX
    with pytest.raises(UsageError, match="reconnect"):
        side.requests.check_room()


def test_a_receive_gets_its_number_when_it_is_matched() -> None:
    """It is the peer's, since the peer has begun."""
    side = table()
    receive = side.request(RequestKind.RECV)
    side.requests.post(receive)
    assert list(side.requests) == [receive]
    side.requests.match(receive, side.requests.admit(2))
    assert side.requests.find(2) is receive
    assert list(side.requests) == [receive]
    side.requests.fail(receive, ConnectionLost("over"), tell=None)
    assert list(side.requests) == []


@pytest.mark.rule("KVW-RQ-01", "keeps")
def test_one_completion_when_it_is_done() -> None:
    """With the bytes moved; its memory drains."""
    side = table()
    request = side.started(RequestKind.GET)
    request.advance(RequestInput.MOVED)
    side.requests.finish(request, held=BufferId(99))
    (done,) = side.done()
    assert (done.request, done.error, done.nbytes, done.held) == (request, None, 5, 99)
    assert side.holds.drained == [request.buffer]
    assert request.over


def test_one_completion_when_it_fails() -> None:
    """Whatever else goes wrong afterwards; the peer is told once."""
    side = table()
    request = side.started()
    side.requests.fail(request, PeerCancelled("first"), tell=WireCode.CANCELLED)
    side.requests.fail(request, PeerCancelled("second"), tell=WireCode.CANCELLED)
    (done,) = side.done()
    assert str(done.error) == "first"
    assert done.nbytes == 0
    assert side.said() == [(1, Fail(WireCode.CANCELLED, "first"))]


def test_whose_memory_drains() -> None:
    """A request's own; a region's belongs to the region."""
    for kind in RequestKind:
        side = table()
        request = side.started(kind)
        side.requests.fail(request, ConnectionLost("over"), tell=None)
        assert side.holds.drained == ([] if kind in SERVING else [request.buffer])


def test_a_request_without_memory_fails_too() -> None:
    """A receive that has met nothing."""
    side = table()
    request = RequestRecord(kind=RequestKind.RECV, wire_id=None, buffer=None, nbytes=5)
    side.requests.post(request)
    side.requests.fail(request, ConnectionLost("over"), tell=WireCode.CANCELLED)
    assert len(side.done()) == 1
    assert side.said() == [], "the peer does not know of it"


def test_done_says_how_much() -> None:
    """All of it, since a put is all or nothing."""
    side = table()
    side.requests.tell_done(side.served(2, RequestKind.SERVE_PUT))
    assert side.said() == [(2, Fin(5))]


@pytest.mark.rule("KVW-RQ-01", "breaks")
def test_a_step_that_does_not_exist() -> None:
    """It names the request, its state and what came."""
    for kind in RequestKind:
        request = RequestRecord(kind=kind, wire_id=RequestId(7), buffer=None, nbytes=1)
        assert request.state is FIRST_STATE[kind]
        with pytest.raises(
            UnexpectedFrame, match=r"request 7: confirmed while"
        ) as caught:
            request.advance(RequestInput.CONFIRMED)
        assert caught.value.rule == "KVW-RQ-01"
        assert request.state is FIRST_STATE[kind]


# --- deadlines


def test_a_request_without_a_deadline_never_expires() -> None:
    """Nor does one whose deadline was met."""
    side = table()
    side.started()
    first = side.started(deadline=5.0)
    side.requests.fail(first, ConnectionLost("over"), tell=None)
    assert side.requests.next_deadline is None
    assert side.requests.expire(1e9) == []


def test_a_receive_that_waits_expires_too() -> None:
    """It has no number yet."""
    side = table()
    receive = side.request(RequestKind.RECV, deadline=3.0)
    side.requests.post(receive)
    assert side.requests.expire(3.0) == [receive]


def test_deadlines_of_the_past_are_forgotten() -> None:
    """A million requests that end in time leave no million entries."""
    side = table()
    keep = [side.started(deadline=1e9 + count) for count in range(10)]
    for count in range(3 * REQUESTS_MAX):
        request = side.started(deadline=1e6 + count)
        side.requests.fail(request, ConnectionLost("over"), tell=None)
        side.done()
        assert len(side.requests._deadlines) <= REQUESTS_MAX
    assert side.requests.expire(1e9 + 4) == keep[:5]
    assert side.requests.next_deadline == 1e9 + 5


def test_the_error_of_a_deadline_says_how_far_it_came() -> None:
    """Kind, state and bytes."""
    request = table().started(RequestKind.GET)
    request.moved = 3
    error = RequestTable.expired(request)
    assert isinstance(error, DeadlineExceeded)
    assert "the get was moving, 3 of 5 bytes" in str(error)
