"""Payloads without frames: each to its place, in the order they were expected."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvwire.backend import Landing
from kvwire.errors import UsageError
from kvwire_tcp.payloads import PayloadReader
from kvwire_tcp.wire import PlainWire
from tests.backends.kvwire_tcp.recorder import DROP, PIECES, VIEW, Body


@dataclass
class Wire:
    """A reader on one end of a socket pair."""

    peer: socket.socket
    sock: socket.socket
    landed: list[Landing] = field(default_factory=list)
    early: int = 0

    def __post_init__(self) -> None:
        self.reader = PayloadReader(self.landed.append, self._note_early)

    def expect(self, length: int, kind: int = VIEW) -> Body:
        body = Body(length, 0, kind)
        self.reader.expect(body)
        return body

    def pour(self, data: bytes) -> None:
        """Send and receive at the same time, as much as each call takes."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.peer.send(rest) :]
            self.take()

    def take(self) -> None:
        """Receive until nothing is left."""
        while True:
            try:
                count = self.reader.receive(PlainWire(self.sock))
            except BlockingIOError:
                return
            assert count, "the stream goes on"
            self.reader.deliver(count)

    def _note_early(self) -> None:
        self.early += 1


@pytest.fixture
def wire() -> Iterator[Wire]:
    peer, sock = socket.socketpair()
    sock.setblocking(False)
    with peer, sock:
        yield Wire(peer, sock)


@pytest.mark.parametrize("seed", range(6))
def test_payloads_of_every_kind_land_however_the_bytes_are_cut(
    wire: Wire, seed: int
) -> None:
    choice = random.Random(seed)
    lengths = [choice.choice([1, 7, 4096, 70_001, 200_000]) for _ in range(12)]
    kinds = [choice.choice([VIEW, PIECES, DROP]) for _ in lengths]
    bodies = [wire.expect(n, kind) for n, kind in zip(lengths, kinds, strict=True)]
    data = os.urandom(sum(lengths))
    rest = data
    while rest:
        cut = choice.choice([1, 100, 5000, 150_000])
        wire.pour(rest[:cut])
        rest = rest[cut:]
    assert wire.landed == bodies
    assert wire.reader.received_bytes == len(data)
    assert wire.early == 0
    for body, length in zip(bodies, lengths, strict=True):
        part, data = data[:length], data[length:]
        assert body.content in (None, part)
        assert (body.content is None) == (body.payload is None)


def test_bytes_that_nobody_expects_stay_where_they_are(wire: Wire) -> None:
    wire.peer.sendall(b"early")
    wire.take()
    assert (wire.early, wire.reader.received_bytes) == (1, 0)
    body = wire.expect(5)
    wire.take()
    assert body.content == b"early"
    assert wire.early == 1


def test_the_end_is_seen_when_nothing_is_expected_and_within_a_payload(
    wire: Wire,
) -> None:
    wire.expect(3)
    wire.peer.sendall(b"no")
    wire.peer.shutdown(socket.SHUT_WR)
    wire.reader.deliver(wire.reader.receive(PlainWire(wire.sock)))
    assert wire.reader.receive(PlainWire(wire.sock)) == 0
    assert wire.reader.position == "2 of 3 payload bytes, 0 more expected"
    wire.reader.stop()
    assert wire.reader.receive(PlainWire(wire.sock)) == 0
    assert wire.reader.position == ""


def test_a_destination_of_another_length_is_refused(wire: Wire) -> None:
    with pytest.raises(UsageError, match="3 bytes does not fit a payload of 4"):
        wire.reader.expect(Landing(4, memoryview(bytearray(3))))
    with pytest.raises(UsageError, match="read-only: True"):
        wire.reader.expect(Landing(3, memoryview(bytes(3))))
    assert wire.reader.position == ""
