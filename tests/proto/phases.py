"""Pairs in every phase of a connection, and requests of every kind, for tests."""

from __future__ import annotations

from kvwire.errors import (
    ConnectionLost,
)
from kvwire.proto.requests import RequestRecord
from kvwire.proto.state import CloseState
from kvwire.wire.control import Close
from kvwire.wire.header import FrameType
from tests.proto.moving import ask
from tests.support.core_pair.pair import ConnectionPair
from tests.support.core_pair.peer import Peer

TAG = 7
LARGE = b"large" * 30_000


def in_phase(phase: CloseState) -> ConnectionPair:
    """A pair whose server is in a phase, with nothing on its way."""
    pair = ConnectionPair()
    if phase in (CloseState.FLUSHING, CloseState.CLOSE_RECEIVED):
        # Something the server has begun and cannot end yet.
        pair.client.stalled = True
        pair.server.get(pair.client.grant(pair.client.expose(100)))
        pair.run()
    if phase in (CloseState.FLUSHING, CloseState.CLOSE_SENT):
        pair.server.close()
    elif phase is CloseState.CLOSE_RECEIVED:
        pair.client.forge(FrameType.CLOSE, Close(1))
        pair.deliver(pair.client)
    elif phase is CloseState.CLOSED:
        pair.server.core.fail(ConnectionLost("test"))
    pair.server.wire.clear()
    assert pair.server.core.phase is phase
    return pair


def everything(pair: ConnectionPair) -> list[tuple[Peer, RequestRecord]]:
    """One request of each kind from each side, none of which can end by itself."""
    begun = []
    for end, other in (
        (pair.client, pair.server),
        (pair.server, pair.client),
    ):
        region = other.expose(100)
        grant = other.grant(region)
        message = end.send(TAG, LARGE)
        assert message is not None
        begun += [
            (end, message),
            (end, end.recv(99)),
            (end, end.put(bytes(100), grant)),
            (end, end.get(grant)),
            (end, ask(end)),
        ]
    return begun


def waiting_on(end: Peer) -> list[RequestRecord]:
    """What nobody at the other end has met: a receive, a message, a transfer."""
    message = end.send(TAG, LARGE)
    assert message is not None
    return [end.recv(99), message, ask(end)]
