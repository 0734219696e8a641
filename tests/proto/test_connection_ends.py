"""What a connection that is closing or over can still be asked for, and its ends."""

from __future__ import annotations

import pytest

from kvwire.errors import (
    ConnectionLost,
    IntegrityError,
    KVWireError,
)
from kvwire.proto.events import Ended
from tests.proto.expect import expect_fine
from tests.proto.phases import LARGE, TAG, everything
from tests.support.core_pair.pair import ConnectionPair

# --- ends


@pytest.mark.parametrize("how", ["lost", "failed", "broken", "bug"])
def test_an_end_ends_everything_once(how: str) -> None:
    """Each request has its one completion, the front hears of the end once."""
    for frames in [0, 3, 9]:
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


def test_close_delivers_what_was_begun() -> None:
    """Whatever was moving when it was called; both sides have the bytes."""
    for frames in range(12):
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
