"""The socket beside a lane: records in order, descriptors, full sockets, the end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvwire.errors import ConnectionLost, ProtocolError
from kvwire.limits import DESCRIPTOR_BYTES_MAX
from kvwire_certify.conformance.rig import open_descriptors
from kvwire_local.wire import (
    ARENAS_MAX,
    LocalMessageType,
    LocalWire,
    PeerProcess,
    peer_process,
)

Ends = tuple[LocalWire, LocalWire, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Two ends, and the socket of the first one for what no lane says."""
    left, right = socket.socketpair()
    for sock in (left, right):
        sock.setblocking(False)
    wires = LocalWire(left), LocalWire(right)
    yield *wires, left
    for wire in wires:
        wire.close()


def test_records_come_whole_and_in_order(ends: Ends) -> None:
    left, right, _ = ends
    assert right.receive() == ([], True)
    bodies = [b"", b"x", bytes(DESCRIPTOR_BYTES_MAX)]
    for body in bodies:
        left.send(LocalMessageType.PLACED, body)
    left.send(LocalMessageType.READ, b"12345678")
    records, there = right.receive()
    assert there
    assert [record.body for record in records] == [*bodies, b"12345678"]
    assert [record.kind for record in records] == [LocalMessageType.PLACED] * 3 + [
        LocalMessageType.READ
    ]


def test_who_takes_some_hears_of_the_end_the_next_time(ends: Ends) -> None:
    left, right, _ = ends
    left.send(LocalMessageType.READ, b"12345678")
    left.close()
    records, there = right.receive(all_of_it=False)
    assert [record.body for record in records] == [b"12345678"]
    assert there, "it did not look"
    assert right.receive(all_of_it=False) == ([], False)


def test_a_full_socket_keeps_the_rest(ends: Ends) -> None:
    left, right, _ = ends
    count = 100
    for number in range(count):
        left.send(LocalMessageType.PLACED, number.to_bytes(2, "little") * 5000)
    full = left.has_unsent
    heard: list[bytes] = []
    while len(heard) < count:
        records, there = right.receive()
        assert there
        heard += [record.body[:2] for record in records]
        left.send_rest()
    assert (full, left.has_unsent) == (True, False)
    assert heard == [number.to_bytes(2, "little") for number in range(count)]


def test_descriptors_come_with_their_records(ends: Ends) -> None:
    left, right, _ = ends
    files = [os.memfd_create(f"arena {number}") for number in range(3)]
    for number, file in enumerate(files):
        os.write(file, b"%d" % number)
        left.send(LocalMessageType.READ, b"between")
        left.send(LocalMessageType.ARENA, b"%d" % number, file)
        os.close(file)
    records, _there = right.receive()
    for record in records:
        if record.kind is LocalMessageType.ARENA:
            file = right.take_fd()
            assert os.pread(file, 10, 0) == record.body
            os.close(file)
    with pytest.raises(ProtocolError, match="without its descriptor"):
        right.take_fd()


def test_descriptors_that_nobody_takes_are_closed(ends: Ends) -> None:
    left, right, _ = ends
    before = len(open_descriptors())
    file = os.memfd_create("arena")
    left.send(LocalMessageType.ARENA, b"", file)
    os.close(file)
    right.receive()
    assert len(open_descriptors()) == before + 1
    right.close()
    assert len(open_descriptors()) < before + 1


def test_an_end_with_unread_records_is_an_end(ends: Ends) -> None:
    left, right, _ = ends
    right.send(LocalMessageType.READ, b"never read")
    left.close()
    assert right.receive() == ([], False)


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\x00\x00\x00\x00\x00\x00\x00",
        b"\x09\x00\x00\x00\x00\x00\x00\x00",
        b"\x01\x00\x00\x00" + (DESCRIPTOR_BYTES_MAX + 1).to_bytes(4, "little"),
    ],
)
def test_what_no_lane_says_is_refused(ends: Ends, said: bytes) -> None:
    _, right, raw = ends
    raw.send(said)
    with pytest.raises(ProtocolError, match=r"record \d"):
        right.receive()


def test_more_descriptors_than_arenas_are_refused(ends: Ends) -> None:
    left, right, _ = ends
    file = os.memfd_create("arena")
    for _ in range(ARENAS_MAX + 1):
        left.send(LocalMessageType.ARENA, b"", file)
    os.close(file)
    with pytest.raises(ProtocolError, match="more records than a lane may have"):
        right.receive()


def test_the_kernel_says_who_is_there() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert peer_process(left) == PeerProcess(os.getpid(), os.geteuid())
    with pytest.raises(ConnectionLost, match="has ended"):
        peer_process(left)
