"""The socket beside a lane: records in order, descriptors, full sockets, the end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ConnectionLost, ProtocolError
from kvwire.kv.fragments import Fragments
from kvwire.limits import DESCRIPTOR_BYTES_MAX
from kvwire_certify.conformance.rig import open_descriptors
from kvwire_local.descriptor import PlaceKind, decode, encode, encode_piece
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


# --- descriptors: short, exact, and read with suspicion -------------------------------


def fragments(addresses: list[int], lengths: list[int]) -> Fragments:
    return Fragments(
        np.array(addresses, np.uint64),
        np.array(lengths, np.uint64),
        owner=None,
        writable=False,
    )


lists = st.lists(
    st.tuples(st.integers(0, 2**46), st.integers(1, 2**20)), min_size=1, max_size=50
)
# As of a KV cache: one length but for the ends, distances of one unit.
regular = st.tuples(
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**20), min_size=1, max_size=100),
    st.integers(1, 2**16),
    st.integers(1, 2**16),
    st.integers(1, 2**16),
    st.integers(0, 16),
)


def assert_is_read_back(kind: PlaceKind, arena: int, said: Fragments) -> bytes | None:
    descriptor = encode(kind, arena, said)
    if descriptor is not None:
        place = decode(descriptor, said.nbytes)
        assert (place.kind, place.arena) == (kind, arena)
        assert place.fragments is not None
        assert place.fragments.addresses.tolist() == said.addresses.tolist()
        assert place.fragments.lengths.tolist() == said.lengths.tolist()
    return descriptor


@given(lists)
def test_any_list_that_fits_is_read_back(pieces: list[tuple[int, int]]) -> None:
    said = fragments(*map(list, zip(*pieces, strict=True)))
    descriptor = assert_is_read_back(PlaceKind.MEMORY, 0, said)
    span = max(a for a, _ in pieces) - min(a for a, _ in pieces)
    assert descriptor is not None or span >= 2**32


@given(regular)
def test_lists_of_a_cache_take_4_bytes_a_fragment(
    cache: tuple[int, list[int], int, int, int, int],
) -> None:
    base, places, first, middle, last, shift = cache
    lengths = [middle] * len(places)
    lengths[0], lengths[-1] = first, last
    said = fragments([base + (place << shift) for place in places], lengths)
    descriptor = assert_is_read_back(PlaceKind.ARENA, 3, said)
    assert descriptor is not None
    assert len(descriptor) == 32 + 4 * len(places)


def test_what_does_not_fit_has_no_descriptor() -> None:
    many = DESCRIPTOR_BYTES_MAX // 4
    assert (
        encode(PlaceKind.MEMORY, 0, fragments([2 * i for i in range(many)], [1] * many))
        is None
    )
    half = DESCRIPTOR_BYTES_MAX // 8
    mixed = fragments([4 * i for i in range(half)], [1 + i % 2 for i in range(half)])
    assert encode(PlaceKind.MEMORY, 0, mixed) is None
    assert encode(PlaceKind.MEMORY, 0, fragments([1, 1 << 45], [1, 1])) is None
    assert encode(PlaceKind.MEMORY, 0, fragments([1], [1 << 32])) is None


def test_what_adds_up_to_something_else_is_refused() -> None:
    descriptor = bytearray(
        encode(PlaceKind.MEMORY, 0, fragments([0, 100], [5, 5])) or b""
    )
    with pytest.raises(ProtocolError, match="fragments with 10 bytes instead of 11"):
        decode(bytes(descriptor), 11)
    with pytest.raises(ProtocolError, match="50 bytes instead of 51"):
        decode(encode_piece(PlaceKind.MEMORY, 0, 4096, 50), 51)
    descriptor[20], descriptor[28] = 0, 10
    with pytest.raises(ProtocolError, match="or an empty fragment"):
        decode(bytes(descriptor), 10)


def test_a_piece_is_told_as_a_list_of_one() -> None:
    said = fragments([1 << 45], [1 << 20])
    descriptor = encode(PlaceKind.ARENA, 5, said)
    assert descriptor == encode_piece(PlaceKind.ARENA, 5, 1 << 45, 1 << 20)
    assert assert_is_read_back(PlaceKind.ARENA, 5, said) == descriptor


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, 3, "kind 3"),
        (1, 2, "form 2"),
        (2, 64, "shift 64"),
        (3, 1, "must be 0"),
        (4, 1, "must be 0"),
        (16, 2, "for 2 fragments"),
        (16, 0, "for 0 fragments"),
        (15, 0x80, "beyond the end"),
        (28, 99, "in the form for several"),
        (20, 99, "in the form for several"),
        (32, 1, "in the form for several"),
    ],
)
def test_each_field_is_checked(place: int, value: int, said: str) -> None:
    descriptor = bytearray(encode(PlaceKind.MEMORY, 0, fragments([4096], [100])) or b"")
    descriptor[place] = value
    with pytest.raises(ProtocolError, match=said) as caught:
        decode(bytes(descriptor), 100)
    assert caught.value.rule == "KVW-LN-07"
