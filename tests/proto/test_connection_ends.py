"""What a connection that is closing or over can still be asked for, and its ends."""

from __future__ import annotations

import pytest

from kvwire.errors import (
    ClosedOK,
    ConnectionLost,
    IntegrityError,
    KVWireError,
    PeerUnresponsive,
    UsageError,
)
from kvwire.limits import REQUESTS_MAX
from kvwire.proto.events import Ended
from kvwire.proto.state import CloseState
from kvwire.wire.control import Fail
from kvwire.wire.header import FrameType
from tests.proto.expect import expect_error, expect_fine
from tests.proto.phases import LARGE, TAG, everything, in_phase, waiting_on
from tests.support.core_pair.pair import ConnectionPair


def test_the_error_of_a_closed_connection_is_a_new_one_each_time() -> None:
    """With the first one as its cause, so that tracebacks do not pile up."""
    pair = in_phase(CloseState.CLOSED)
    errors = []
    for _ in range(2):
        with pytest.raises(ConnectionLost) as caught:
            pair.server.core.eager_header(TAG, 5, None)
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert errors[0].__cause__ is errors[1].__cause__ is pair.server.core.error


def test_how_many_requests_may_be_open() -> None:
    """The next one is refused before anything is sent."""
    pair = ConnectionPair()
    for _ in range(REQUESTS_MAX):
        pair.client.core.recv(TAG, None, 5, None)
    core, buffer = pair.client.core, pair.client.lend(100)
    with pytest.raises(UsageError, match=f"{REQUESTS_MAX} requests are open"):
        core.recv(TAG, None, 5, None)
    with pytest.raises(UsageError, match=f"{REQUESTS_MAX} requests are open"):
        core.send(TAG, buffer, 100, None)
    assert not pair.client.core.outbox.frames


# --- ends


@pytest.mark.parametrize("how", ["lost", "failed", "broken", "bug"])
@pytest.mark.parametrize("frames", [0, 3, 9])
def test_an_end_ends_everything_once(how: str, frames: int) -> None:
    """Each request has its one completion, the front hears of the end once."""
    pair = ConnectionPair()
    begun = everything(pair)
    for _ in range(frames):
        pair.deliver(pair.client)
        pair.deliver(pair.server)
    error: KVWireError = ConnectionLost("cut")
    match how:
        case "lost":
            pair.client.lose()
        case "failed":
            pair.client.core.fail(error)
        case "broken":
            pair.server.wire.appendleft((bytes(32), b""))
            pair.deliver(pair.server)
        case _:
            pair.client.core.fail(IntegrityError("whatever"))
    pair.client.collect()
    pair.client.core.fail(error)
    expect = [request for end, request in begun if end is pair.client]
    assert all(request in pair.client.done for request in expect)
    for request in expect:
        assert isinstance(pair.client.error(request), (ConnectionLost, type(None)))
    pair.run()
    (end,) = [e for e in pair.client.events if isinstance(e, Ended)]
    assert not end.graceful
    assert pair.client.core.holds.retired == frozenset()
    pair.client.core.link_lost()
    if how in ("broken", "bug"):
        assert pair.client.core.error is not None
        assert pair.client.core.error.__cause__ is not None


def test_a_link_that_was_lost_with_a_reason() -> None:
    """It is what the requests end with."""
    pair = ConnectionPair()
    receive = pair.client.recv(TAG)
    reason = PeerUnresponsive("the cable")
    pair.client.core.link_lost(reason)
    pair.client.collect()
    assert pair.client.error(receive) is reason


def test_what_was_only_announced_cannot_be_received_after_the_end() -> None:
    """It is not here, and it will not come."""
    pair = ConnectionPair()
    pair.client.send(TAG, LARGE)
    pair.run()
    pair.server.lose()
    with pytest.raises(ConnectionLost):
        pair.server.recv(TAG, None)


# --- closing


@pytest.mark.parametrize("who", ["client", "server"])
def test_each_side_is_told_who_closed(who: str) -> None:
    """The requests that end with the close, and the connection itself."""
    pair = ConnectionPair()
    closer, other = pair.client, pair.server
    if who == "server":
        closer, other = other, closer
    begun = {end: end.recv(TAG, None) for end in (closer, other)}
    closer.close()
    expect_fine(pair)
    for end, said in (
        (closer, "this side closed the connection"),
        (other, "the peer closed the connection"),
    ):
        assert str(end.core.error) == said
        assert str(end.error(begun[end])) == said


@pytest.mark.parametrize("frames", range(6))
def test_the_peer_closes_while_this_side_puts_and_gets(frames: int) -> None:
    """What this side has begun it still delivers, and then it answers."""
    pair = ConnectionPair()
    region = pair.server.expose(len(LARGE))
    grant = pair.server.grant(region)
    put, got = pair.client.put(LARGE, grant), pair.client.get(grant)
    for _ in range(frames):
        pair.deliver(pair.client)
        pair.deliver(pair.server)
    pair.server.close()
    expect_fine(pair)
    assert pair.client.error(put) is None
    assert pair.client.error(got) is None
    for end in (pair.client, pair.server):
        assert type(end.core.error) is ClosedOK


@pytest.mark.parametrize("frames", range(12))
def test_close_delivers_what_was_begun(frames: int) -> None:
    """Whatever was moving when it was called; both sides have the bytes."""
    pair = ConnectionPair()
    region = pair.server.expose(len(LARGE))
    grant = pair.server.grant(region)
    receive = pair.server.recv(TAG, None)
    message = pair.client.send(TAG, LARGE)
    pair.run()
    put, got = pair.client.put(LARGE, grant), pair.client.get(grant)
    assert message is not None
    for _ in range(frames):
        pair.deliver(pair.client)
        pair.deliver(pair.server)
    pair.client.close()
    pair.client.close()
    expect_fine(pair)
    assert pair.server.received(receive) == LARGE
    assert pair.client.error(message) is None
    assert pair.client.error(put) is None
    assert pair.client.error(got) is None
    assert pair.server.content(region.buffer) == LARGE
    for end in (pair.client, pair.server):
        assert end.ended is not None
        assert end.ended.graceful


def test_close_waits_for_what_this_side_has_begun() -> None:
    """A message may still be received, a transfer answered; until the deadline."""
    pair = ConnectionPair()
    receive, message, transfer = waiting_on(pair.client)
    pair.run()
    pair.client.close()
    pair.run()
    expect_error(pair.client, receive, ClosedOK)
    assert message not in pair.client.done
    taken = pair.server.recv(TAG, None)
    pair.run()
    assert pair.server.received(taken) == LARGE
    assert pair.client.error(message) is None
    pair.advance(6.0)
    expect_error(pair.client, transfer, ConnectionLost)


def test_a_failure_for_what_is_over_is_late() -> None:
    """Dropped, for ours and for theirs."""
    pair = ConnectionPair()
    request = pair.client.get(pair.server.grant(pair.server.expose(100)))
    expect_fine(pair)
    for end in (pair.client, pair.server):
        end.forge(FrameType.FAIL, Fail(36, ""), request=request.wire_id or 0)
    expect_fine(pair)


def test_close_has_a_deadline_also_when_the_peer_was_first() -> None:
    """The first call sets it, later ones do not move it."""
    pair = in_phase(CloseState.CLOSE_RECEIVED)
    pair.server.close(timeout_s=3.0)
    pair.advance(2.0)
    pair.server.close(timeout_s=3.0)
    pair.advance(1.5)
    assert type(pair.server.core.error) is ConnectionLost
