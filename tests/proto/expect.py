"""What tests of a pair ask again and again."""

from __future__ import annotations

from kvwire.errors import KVWireError
from kvwire.proto.requests import RequestRecord
from kvwire.wire.header import decode_header
from tests.support.core_pair.peer import ConnectionPair, Peer
from tests.support.splitter import Frame


def expect_broken(pair: ConnectionPair, peer: Peer, rule: str) -> None:
    """After all frames, ``peer`` has found that rule broken, and everything is over."""
    pair.run()
    assert peer.broken is not None, f"{rule}: nothing was refused"
    assert peer.broken.rule == rule, peer.broken
    for end in (pair.client, pair.server):
        assert end.ended is not None
        assert end.lost
        assert all(request.over for request in end.done)


def expect_fine(pair: ConnectionPair) -> None:
    """After all frames, nobody has found any rule broken."""
    pair.run()
    for end in (pair.client, pair.server):
        assert end.broken is None, end.broken


def expect_error(
    peer: Peer, request: RequestRecord | None, kind: type[KVWireError]
) -> None:
    """A request is over, with an error of exactly this class."""
    assert request is not None
    assert type(peer.error(request)) is kind, peer.error(request)


def on_the_wire(peer: Peer) -> list[Frame]:
    """The frames that are on their way from one end."""
    return [Frame(decode_header(header), header, body) for header, body in peer.wire]
