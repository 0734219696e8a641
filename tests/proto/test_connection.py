"""A connection in every phase: what it accepts, what it answers, and how it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvwire import errors
from kvwire.proto.events import Ended
from kvwire.proto.records import RequestRecord
from kvwire.proto.state import CloseState
from kvwire.wire.control import AccessBody, Announce, Close, Credit, Ping
from kvwire.wire.header import FrameType
from tests.proto.moving import (
    expect_broken,
    expect_error,
    expect_fine,
    moved,
    on_the_wire,
)
from tests.support.core_pair.peer import ConnectionPair, Peer

TAG = 7
LARGE = b"large" * 30_000


def in_phase(phase: CloseState, close_timeout_s: float = 5.0) -> ConnectionPair:
    """A pair whose server is in a phase, with nothing on its way."""
    pair = ConnectionPair()
    if phase in (CloseState.FLUSHING, CloseState.CLOSE_RECEIVED):
        # Something the server has begun and cannot end yet.
        pair.client.stalled = True
        pair.server.get(pair.client.grant(pair.client.expose(100)))
        pair.run()
    if phase in (CloseState.FLUSHING, CloseState.CLOSE_SENT):
        pair.server.close(close_timeout_s)
    elif phase is CloseState.CLOSE_RECEIVED:
        pair.client.forge(FrameType.CLOSE, Close(1))
        pair.deliver(pair.client)
    elif phase is CloseState.CLOSED:
        pair.server.core.fail(errors.ConnectionLost("test"))
    pair.server.wire.clear()
    assert pair.server.core.phase is phase
    return pair


def everything(
    pair: ConnectionPair, deadline: float | None = None
) -> list[tuple[Peer, RequestRecord]]:
    """One request of each kind from each side, none of which can end by itself.

    Those of the client have the deadline.
    """
    begun = []
    for end, other in ((pair.client, pair.server), (pair.server, pair.client)):
        grant = other.grant(other.expose(100))
        until = deadline if end is pair.client else None
        message = end.send(TAG, LARGE, deadline=until)
        assert message is not None
        begun += [
            (end, message),
            (end, end.recv(99, deadline=until)),
            (end, end.put(bytes(100), grant, deadline=until)),
            (end, end.get(grant, deadline=until)),
            (end, end.open(deadline=until)),
        ]
    return begun


# --- the link


@pytest.mark.rule("KVW-CN-01", "KVW-CN-02", "keeps")
def test_no_rule_is_broken_in_a_quiet_hour() -> None:
    """Pings and their answers, nothing else."""
    pair = ConnectionPair()
    pair.advance(3600)
    expect_fine(pair)
    assert pair.client.core.phase is CloseState.OPEN
    assert pair.client.events == []


@pytest.mark.rule("KVW-CN-01", "breaks")
def test_the_handshake_is_over() -> None:
    """None of its frames comes again, REFUSE included."""
    for frame_type in [
        *(FrameType.HELLO, FrameType.ACCEPT, FrameType.CONFIRM, FrameType.REFUSE),
        *(FrameType.OFFER, FrameType.CHOICE),
    ]:
        pair = ConnectionPair()
        frame = pair.client.core.outbox.framing.control(frame_type, bytes(224))
        pair.client.wire.append(frame)
        expect_broken(pair, pair.server, "KVW-CN-01")


def test_any_byte_is_a_sign_of_life() -> None:
    """Also of a frame that takes longer than the whole patience."""
    pair = ConnectionPair()
    for _ in range(10):
        pair.server.now += 1.9
        pair.server.core.liveness.note_received(pair.server.now)
        pair.server.tick()
    assert not pair.server.core.closed
    said = [frame.header.type for frame in on_the_wire(pair.server)]
    assert said == [FrameType.PING] * 5, "only that it lives, having said nothing else"


# --- time


def test_a_silent_peer_is_dead_within_its_patience() -> None:
    """Goal R13: 6.5 s; every open request ends with it."""
    pair = ConnectionPair()
    begun = [request for end, request in everything(pair) if end is pair.client]
    pair.client.wire.clear()
    pair.server.wire.clear()
    end = pair.client
    while not end.core.closed:
        end.now = end.core.next_tick
        end.tick()
    assert 6.0 <= end.now - pair.now <= 6.5
    assert isinstance(end.core.error, errors.PeerUnresponsive)
    assert "silent for 6.0 s" in str(end.core.error)
    for request in begun:
        expect_error(end, request, errors.PeerUnresponsive)
    end.tick()
    assert len([e for e in end.events if e is end.ended]) == 1


@pytest.mark.parametrize("phase", [p for p in CloseState if p is not CloseState.CLOSED])
def test_whoever_gives_up_a_silent_peer_says_so(phase: CloseState) -> None:
    """With the one CLOSE that a side has; then it is too late for that."""
    end = in_phase(phase, close_timeout_s=1e9).server
    while not end.core.closed:
        end.now = end.core.next_tick
        end.tick()
    assert isinstance(end.core.error, errors.PeerUnresponsive)
    said = [f.header.type for f in on_the_wire(end) if f.header.type == FrameType.CLOSE]
    assert len(said) == (phase is not CloseState.CLOSE_SENT)


def test_a_peer_that_has_heard_nothing_lives_and_its_connection_is_lost() -> None:
    pair = ConnectionPair()
    end, begun = pair.server, pair.server.recv(TAG)
    assert end.core.liveness.peer_receives(end.now)
    pair.client.forge(FrameType.CLOSE, Close(errors.WireCode.UNRESPONSIVE))
    pair.deliver(pair.client)
    assert isinstance(end.core.error, errors.ConnectionLost)
    assert isinstance(end.core.error.__cause__, errors.PeerUnresponsive)
    expect_error(end, begun, errors.ConnectionLost)
    assert end.ended is not None
    assert not end.ended.graceful


def test_a_deadline_ends_its_requests() -> None:
    """Of every kind, on both sides; the others do not notice."""
    pair = ConnectionPair()
    pair.client.stalled = pair.server.stalled = True
    begun = everything(pair, deadline=pair.now + 1.0)
    pair.run()
    assert pair.client.core.next_tick == pair.now + 1.0
    pair.advance(1.5)
    for end, request in begun:
        if end is pair.client:
            expect_error(end, request, errors.DeadlineExceeded)
        else:
            assert request not in end.done
    told = [
        done
        for done in pair.server.done.values()
        if isinstance(done.error, errors.DeadlineExceeded)
    ]
    assert len(told) == 3, "the put, the get and the transfer"


# --- closing


@pytest.mark.rule("KVW-CL-01", "KVW-CL-02", "keeps")
@pytest.mark.parametrize("who", ["client", "server", "both"])
def test_close_when_idle(who: str) -> None:
    """One CLOSE from each side, and both end gracefully."""
    pair = ConnectionPair()
    for name in ("client", "server") if who == "both" else (who,):
        getattr(pair, name).close()
    expect_fine(pair)
    for end in (pair.client, pair.server):
        assert end.ended is not None
        assert end.ended.graceful
        assert type(end.core.error) is errors.ClosedOK
        assert end.core.phase is CloseState.CLOSED


def test_close_may_be_called_in_every_phase() -> None:
    """And again, and leads to an end."""
    for phase in CloseState:
        pair = in_phase(phase)
        for _ in range(2):
            pair.server.close(timeout_s=1.0)
        pair.advance(6.0)
        assert pair.server.core.phase is CloseState.CLOSED
        assert pair.server.core.error is not None


def test_close_has_a_deadline() -> None:
    """A peer that never finishes does not hold it up."""
    pair = ConnectionPair()
    pair.server.stalled = True
    got = pair.client.get(pair.server.grant(pair.server.expose(100)))
    pair.run()
    pair.client.close(timeout_s=3.0)
    assert pair.client.core.phase is CloseState.FLUSHING
    assert pair.client.core.next_tick <= pair.now + 3.0
    pair.advance(2.9)
    assert got not in pair.client.done
    pair.advance(0.2)
    expect_error(pair.client, got, errors.ConnectionLost)
    assert "in time" in str(pair.client.error(got))


@pytest.mark.rule("KVW-CL-01", "breaks")
def test_a_second_close() -> None:
    """While the first is being answered."""
    pair = in_phase(CloseState.CLOSE_RECEIVED)
    pair.client.forge(FrameType.CLOSE, Close(1))
    expect_broken(pair, pair.server, "KVW-CL-01")


@pytest.mark.rule("KVW-CL-02", "breaks")
def test_nothing_starts_after_close() -> None:
    """The peer has said that it starts nothing."""
    for what in ["message", "announce", "put", "get", "open"]:
        pair = in_phase(CloseState.CLOSE_RECEIVED)
        start_something(pair, what)
        expect_broken(pair, pair.server, "KVW-CL-02")


def start_something(pair: ConnectionPair, what: str) -> None:
    """As a client would whose core has not noticed that it has closed."""
    client = pair.client
    other = ConnectionPair()
    match what:
        case "message":
            client.forge_payload(FrameType.MESSAGE, b"x", offset=TAG)
        case "announce":
            client.forge(FrameType.ANNOUNCE, Announce(bytes(8), 500), request=1)
        case "put":
            access = other.server.grant(other.server.expose(5))
            client.forge(FrameType.PUT, access, request=1)
        case "get":
            access = other.server.grant(other.server.expose(5))
            client.forge(FrameType.GET, access, request=1)
        case _:
            client.open()


@pytest.mark.rule("KVW-CL-02", "keeps")
@pytest.mark.parametrize(
    "phase", [CloseState.OPEN, CloseState.FLUSHING, CloseState.CLOSE_SENT]
)
def test_the_peer_may_start_until_it_has_closed(phase: CloseState) -> None:
    """Its frames and our CLOSE may have crossed."""
    for what in ["message", "announce", "put", "get", "open"]:
        pair = in_phase(phase)
        start_something(pair, what)
        pair.deliver(pair.client)
        assert pair.server.broken is None


def test_a_frame_whose_body_comes_after_the_end() -> None:
    """A control frame is not acted on; payload gives its memory back."""
    pair = ConnectionPair()
    got = pair.client.get(pair.server.grant(pair.server.expose(100)))
    pair.deliver(pair.client)
    header, body = pair.server.wire.popleft()
    arrival = pair.client.header(header)
    pair.server.forge(FrameType.PING, Ping(1))
    ping_header, ping_body = pair.server.wire.popleft()
    ping = pair.client.header(ping_header)
    assert arrival is not None
    assert ping is not None
    pair.client.core.fail(errors.ConnectionLost("test"))
    pair.client.collect()
    assert got.buffer in pair.client.memory
    pair.client.body(arrival, body)
    assert got.buffer in pair.client.freed
    pair.client.body(ping, ping_body)
    assert not pair.client.core.outbox.frames


# --- the application, when it is too late


STARTS: tuple[Callable[[Peer, AccessBody], object], ...] = (
    lambda end, _: end.core.send(TAG, end.lend(100), 100, None),
    lambda end, access: end.put(bytes(5), access),
    Peer.get,
    lambda end, _: end.grant(end.expose(5)),
    lambda end, _: end.open(),
)


@pytest.mark.parametrize("phase", [p for p in CloseState if p is not CloseState.OPEN])
def test_nothing_can_be_started_any_more(phase: CloseState) -> None:
    """ConnectionClosed, and nothing is sent."""
    other = ConnectionPair().server
    for begin in STARTS:
        end = in_phase(phase).server
        with pytest.raises(errors.ConnectionClosed) as caught:
            begin(end, other.grant(other.expose(5)))
        assert end.core.eager_header(TAG, 5, None) is None
        expected = (
            errors.ConnectionLost if phase is CloseState.CLOSED else errors.ClosedOK
        )
        assert type(caught.value) is expected
        assert not end.wire


@pytest.mark.parametrize("ended", ["closed", "lost", "answering"])
def test_what_is_here_can_still_be_received(ended: str) -> None:
    """In its order; after it there is nothing, and that is said."""
    pair = ConnectionPair()
    for data in (b"one", b"two"):
        pair.client.send(TAG, data)
    pair.run()
    if ended == "closed":
        pair.client.close()
        pair.run()
    elif ended == "lost":
        pair.server.lose()
    else:
        pair.server.stalled = pair.client.stalled = True
        pair.server.get(pair.client.grant(pair.client.expose(100)))
        pair.run()
        pair.client.forge(FrameType.CLOSE, Close(1))
        pair.deliver(pair.client)
        assert pair.server.core.phase is CloseState.CLOSE_RECEIVED
    for data in (b"one", b"two"):
        assert pair.server.received(pair.server.recv(TAG, 100)) == data
    with pytest.raises(errors.ConnectionClosed):
        pair.server.recv(TAG, 100)
    if ended != "answering":
        assert not pair.server.core.outbox.frames


def test_nothing_is_sent_after_the_end() -> None:
    """Chunks that wait for their turn stay where they are."""
    pair = ConnectionPair()
    pair.client.stalled = True
    pair.client.put(LARGE, pair.server.grant(pair.server.expose(len(LARGE))))
    core = pair.client.core
    sending = [core.sending]
    core.fail(errors.ConnectionLost("test"))
    sending.append(core.sending)
    assert sending == [True, False]
    core.outbox.frames.clear()
    core.outbox.send(FrameType.CREDIT, Credit(1, 1))
    assert not core.outbox.frames
    assert core.next_chunk() is None
    assert core.due_bytes == 0


def test_a_request_that_is_withdrawn_and_one_that_is_cancelled() -> None:
    """Both are over; only what the peer knows of is told."""
    pair = ConnectionPair()
    one, two = pair.client.recv(TAG), pair.client.recv(TAG)
    assert pair.client.core.withdraw(one)
    pair.client.cancel(two)
    assert not pair.client.core.withdraw(two)
    for request in (one, two):
        expect_error(pair.client, request, errors.RequestCancelled)
    assert not pair.client.wire


def test_a_message_announced_while_the_peer_closes() -> None:
    """ANNOUNCE and CLOSE cross: it fails here, and is turned away there."""
    pair = ConnectionPair()
    pair.client.close()
    message, transfer = pair.server.send(TAG, LARGE), pair.server.open()
    expect_fine(pair)
    for request in (message, transfer):
        expect_error(pair.server, request, errors.ClosedOK)


def test_a_close_waits_until_the_wire_is_through() -> None:
    """With the last chunk of a message, which is all that holds CLOSE up."""
    pair = ConnectionPair()
    pair.client.slow = True
    pair.server.recv(TAG, len(LARGE))
    message = pair.client.send(TAG, LARGE)
    pair.run()
    pair.client.close()
    expect_fine(pair)
    assert message is not None
    assert not message.over
    while pair.client._leaving:
        assert not pair.server.core.closed
        pair.client.complete()
    pair.run()
    assert pair.client.core.closed
    assert pair.server.core.closed


def test_idle_while_nothing_is_open() -> None:
    """On either side, whoever has begun it."""
    pair = ConnectionPair()
    ends = (pair.client, pair.server)
    idle = [[not end.core.open_requests for end in ends]]
    assert pair.client.core.liveness.silence_s(pair.now + 5.0) == 5.0
    pair.server.stalled = True
    pair.client.get(pair.server.grant(pair.server.expose(100)))
    pair.deliver(pair.client)
    idle.append([not end.core.open_requests for end in ends])
    assert [end.core.open_requests for end in ends] == [1, 1]
    pair.server.stalled = False
    expect_fine(pair)
    idle.append([not end.core.open_requests for end in ends])
    assert idle == [[True, True], [False, False], [True, True]]


def test_what_has_landed_is_said_before_a_transfer_fails() -> None:
    """A mark in the header of its chunk, and no answer to it by itself."""
    m = moved()
    m.mark(b"x")
    assert m.names == ["MARKED_DATA"]
    m.pair.run()
    m.consumer.core.refuse(
        m.incoming, errors.RequestCancelled("enough"), errors.WireCode.CANCELLED
    )
    m.consumer.collect()
    assert m.names == ["SEGMENT_ACK", "FAIL"]


@pytest.mark.parametrize("how", ["lost", "failed", "broken", "bug"])
def test_an_end_ends_everything_once(how: str) -> None:
    """Each request has its one completion, the front hears of the end once."""
    for frames in [0, 3, 9]:
        pair = ConnectionPair()
        begun = everything(pair)
        for _ in range(frames):
            pair.deliver(pair.client)
            pair.deliver(pair.server)
        error: errors.KVWireError = errors.ConnectionLost("cut")
        match how:
            case "lost":
                pair.client.lose()
            case "failed":
                pair.client.core.fail(error)
            case "broken":
                pair.server.wire.appendleft((bytes(32), b""))
                pair.deliver(pair.server)
            case _:
                pair.client.core.fail(errors.IntegrityError("whatever"))
        pair.client.collect()
        pair.client.core.fail(error)
        expect = [request for end, request in begun if end is pair.client]
        assert all(request in pair.client.done for request in expect)
        for request in expect:
            assert isinstance(
                pair.client.error(request), (errors.ConnectionLost, type(None))
            )
        pair.run()
        (end,) = [e for e in pair.client.events if isinstance(e, Ended)]
        assert not end.graceful
        assert pair.client.core.holds.retired == frozenset()
        pair.client.core.link_lost()
        if how in ("broken", "bug"):
            assert pair.client.core.error is not None
            assert pair.client.core.error.__cause__ is not None


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
