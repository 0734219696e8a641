"""The pair in memory: nothing moves by itself, and everything ends."""

from __future__ import annotations

import pytest

from kvwire.errors import ClosedOK, ConnectionLost, PeerUnresponsive
from kvwire.types import Role, TrustMode
from kvwire.wire.control import Ping
from kvwire.wire.header import FrameType
from tests.support.core_pair.handshakes import begin, identity, shake
from tests.support.core_pair.inlet import Inlet
from tests.support.core_pair.pair import ConnectionPair

both_modes = pytest.mark.parametrize("trust", list(TrustMode))


@both_modes
def test_the_example_of_its_docstring(trust: TrustMode) -> None:
    """A message from one end to the other."""
    pair = ConnectionPair(trust=trust)
    received = pair.server.recv(7)
    pair.client.send(7, b"hello")
    assert received not in pair.server.done
    pair.run()
    assert pair.server.received(received) == b"hello"


def test_frames_wait_to_be_delivered() -> None:
    """One at a time, in their order; False when there is none."""
    pair = ConnectionPair()
    pair.client.send(1, b"a")
    pair.client.send(1, b"b")
    assert [pair.deliver(pair.client) for _ in range(3)] == [True, True, False]
    assert not pair.deliver(pair.server)
    assert [pair.server.received(pair.server.recv(1)) for _ in "ab"] == [b"a", b"b"]


def test_own_identities_and_handshakes() -> None:
    """What a pair is made from."""
    shaken = shake(begin(identity("one"), identity("two")))
    pair = ConnectionPair(shaken=shaken)
    assert pair.client.core.agreement.peer.name == "two"
    assert pair.of(Role.SERVER) is pair.server
    named = ConnectionPair(client=identity("three"), server=identity("four"))
    assert named.server.core.agreement.peer.name == "three"


@pytest.mark.slow
def test_time_passes_when_it_is_told_to() -> None:
    """Pings keep a quiet pair alive for a day; a lost end is noticed in 6.5 s."""
    pair = ConnectionPair()
    pair.advance(86_400)
    assert pair.now == 87_400
    assert pair.client.events == []
    pair.server.lose()
    pair.advance(6.5)
    assert pair.client.ended is not None
    assert isinstance(pair.client.ended.error, PeerUnresponsive)


def test_an_end_that_closes_ends_both() -> None:
    """When all is said; at once if it is an error."""
    pair = ConnectionPair()
    pair.client.close()
    pair.run()
    for end in (pair.client, pair.server):
        assert end.lost
        assert type(end.core.error) is ClosedOK
    broken = ConnectionPair()
    broken.client.forge(FrameType.PONG, Ping(5))
    broken.run()
    assert broken.server.broken is not None
    assert type(broken.client.core.error) is ConnectionLost


def test_a_slow_wire_and_a_stuck_one() -> None:
    """Payload leaves when it may; its memory is free when the wire says so."""
    pair = ConnectionPair()
    region = pair.server.expose(10)
    pair.client.stalled = True
    put = pair.client.put(b"0123456789", pair.server.grant(region))
    pair.run()
    assert pair.server.content(region.buffer) == bytes(10)
    pair.client.stalled, pair.client.slow = False, True
    pair.client.collect()
    pair.run()
    assert pair.server.content(region.buffer) == b"0123456789"
    assert put.buffer in pair.client.memory
    pair.client.complete()
    assert put.buffer in pair.client.freed
    assert pair.client.error(put) is None


def test_bytes_in_pieces() -> None:
    """Fed byte by byte, an end hears the same; after a broken rule it hears nothing."""
    pair = ConnectionPair()
    received = pair.server.recv(7)
    pair.client.send(7, b"hello")
    header, body = pair.client.wire.popleft()
    for value in header + body:
        pair.server.feed(bytes([value]))
    assert pair.server.received(received) == b"hello"
    pair.server.feed(bytes(32) + header + body)
    assert pair.server.broken is not None
    assert len(pair.server.done) == 1


def test_an_inlet_hands_on_what_it_was_told_to() -> None:
    """Header, then as much as was asked for, none included; then it may be stopped."""
    headers: list[bytes] = []
    bodies: list[bytes] = []

    def begin_frame(raw: bytes) -> int | None:
        headers.append(raw)
        return raw[0] if raw[0] != 255 else None

    inlet = Inlet(begin_frame, bodies.append)
    data = bytes([3]).ljust(32) + b"abc" + bytes(32) + bytes([255]).ljust(32) + b"rest"
    for place in range(0, len(data), 5):
        inlet.feed(data[place : place + 5])
    assert [raw[0] for raw in headers] == [3, 0, 255]
    assert bodies == [b"abc", b""]
    assert inlet.stopped
    assert not inlet._pending
