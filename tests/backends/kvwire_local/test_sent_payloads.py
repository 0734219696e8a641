"""Each payload gets the right descriptor; false acknowledgements are not believed."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.backend import Landing
from kvwire.errors import ProtocolError
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB, LANE_PAYLOADS_MAX, MIB
from kvwire.memory.arena import Arena
from kvwire.memory.buffers import MID_PAGE_BYTES
from kvwire.memory.copy import address_of
from kvwire_local.descriptor import LATER, PlaceKind, decode, encode_piece
from kvwire_local.peer import PeerMemory
from kvwire_local.received_payloads import ReceivedPayloads
from kvwire_local.sent_payloads import (
    READ_COUNT,
    STAGING_BYTES,
    SentPayloads,
    Staging,
)
from kvwire_local.shared_arenas import ReadMethod, SharedArenas
from kvwire_local.wire import (
    ARENAS_BYTES_MAX,
    ARENAS_MAX,
    LocalMessageType,
    LocalWire,
    PeerProcess,
)

BOTH = ReadMethod.MEMORY | ReadMethod.ARENA


Ends = tuple[LocalWire, LocalWire]


def shared_arenas(
    wire: LocalWire, methods: ReadMethod = BOTH, *, whole: bool = True
) -> SharedArenas:
    return SharedArenas(wire, methods, whole=whole, wake=lambda: None)


@pytest.fixture
def ends() -> Iterator[Ends]:
    socks = socket.socketpair()
    for sock in socks:
        sock.setblocking(False)
    wires = LocalWire(socks[0]), LocalWire(socks[1])
    yield wires
    for wire in wires:
        wire.close()


@pytest.fixture
def outgoing() -> Iterator[SentPayloads]:
    found = SentPayloads()
    yield found
    found.close()


def every_other(
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]], size: int
) -> Fragments:
    count = memory.size // (2 * size)
    places = np.arange(count, dtype=np.uint64) * np.uint64(2 * size)
    return Fragments(
        places + np.uint64(memory.ctypes.data),
        np.full(count, size, np.uint64),
        owner=memory,
        writable=True,
    )


@pytest.mark.parametrize(
    ("methods", "size", "in_arena", "kind", "count"),
    [
        (BOTH, 64 * KIB, False, PlaceKind.MEMORY, 16),
        (BOTH, 8 * KIB, False, PlaceKind.MEMORY, 128),
        (BOTH, 4 * KIB, False, PlaceKind.ARENA, 1),
        (BOTH, 64 * KIB, True, PlaceKind.ARENA, 16),
        (BOTH, 4 * KIB, True, PlaceKind.ARENA, 1),
        (BOTH, 1 * MIB, True, PlaceKind.ARENA, 1),
        (BOTH, 64, True, PlaceKind.ARENA, 1),
        (ReadMethod.ARENA, 64 * KIB, True, PlaceKind.ARENA, 16),
        (ReadMethod.ARENA, 64 * KIB, False, PlaceKind.ARENA, 1),
        (ReadMethod.MEMORY, 1 * MIB, True, PlaceKind.MEMORY, 1),
        (ReadMethod.MEMORY, 4 * KIB, True, PlaceKind.MEMORY, 1),
    ],
)
def test_each_payload_gets_the_descriptor_that_suits_it(
    ends: Ends,
    outgoing: SentPayloads,
    methods: ReadMethod,
    size: int,
    in_arena: bool,
    kind: PlaceKind,
    count: int,
) -> None:
    arena = Arena(2 * MIB)
    memory = arena.buffer(2 * MIB) if in_arena else np.zeros(2 * MIB, np.uint8)
    outgoing.come_up(shared_arenas(ends[0], methods))
    descriptor = outgoing.send(every_other(memory, size), "token")
    place = decode(descriptor, MIB)
    assert place.fragments is not None
    assert (place.kind, len(place.fragments)) == (kind, count)
    records, _ = ends[1].receive()
    assert [record.kind for record in records] == [LocalMessageType.ARENA] * (
        kind is PlaceKind.ARENA
    )
    assert outgoing.read(READ_COUNT.pack(1)) == ["token"]
    assert len(outgoing) == 0
    outgoing.close()
    del memory
    arena.close()


@pytest.mark.parametrize("in_arena", [False, True])
@pytest.mark.parametrize("methods", [BOTH, ReadMethod.ARENA])
def test_a_peer_that_may_not_read_everything_gets_copies(
    ends: Ends, outgoing: SentPayloads, methods: ReadMethod, in_arena: bool
) -> None:
    arena = Arena(MIB)
    memory = arena.buffer(MIB) if in_arena else np.zeros(MIB, np.uint8)
    memory[:] = 9
    outgoing.come_up(shared_arenas(ends[0], methods, whole=False))
    place = decode(outgoing.send(memory.data, "token"), MIB)
    assert place.kind is PlaceKind.ARENA
    assert len(ends[1].receive()[0]) == 1
    fd = ends[1].take_fd()
    assert place.fragments is not None
    copy = os.pread(fd, MIB, int(place.fragments.addresses[0]))
    assert copy == memory.tobytes()
    assert not os.path.samestat(os.fstat(fd), os.fstat(arena.fileno()))
    os.close(fd)
    outgoing.close()
    del memory
    arena.close()


def test_an_arena_is_taken_back_when_all_of_it_was_read(
    ends: Ends, outgoing: SentPayloads
) -> None:
    closed: list[bool] = []
    arenas = SharedArenas(ends[0], BOTH, whole=True, wake=lambda: closed.append(True))
    outgoing.come_up(arenas)
    arena = Arena(MIB)
    descriptors = [outgoing.send(arena.buffer(4096).data, n) for n in range(2)]
    assert {decode(descriptor, 4096).arena for descriptor in descriptors} == {0}
    assert not arena.release()  # payload is on its way
    assert closed == [True]
    for count, kinds in (
        (1, [LocalMessageType.ARENA]),
        (2, [LocalMessageType.UNSHARED]),
    ):
        outgoing.sweep()
        outgoing.read(READ_COUNT.pack(count))
        assert [record.kind for record in ends[1].receive()[0]] == kinds
    outgoing.sweep()
    assert not ends[1].receive()[0]


def test_beyond_so_many_bytes_memory_is_ordinary(
    ends: Ends, outgoing: SentPayloads
) -> None:
    """A sparse arena of half of them is shared once."""
    outgoing.come_up(shared_arenas(ends[0], BOTH))
    with Arena(ARENAS_BYTES_MAX // 2 + MIB) as first, Arena(first.nbytes) as second:
        descriptors = [
            outgoing.send(arena.buffer(4096).data, None) for arena in (first, second)
        ]
        kinds = [decode(descriptor, 4096).kind for descriptor in descriptors]
        assert kinds == [PlaceKind.ARENA, PlaceKind.MEMORY]
        outgoing.close()


def test_beyond_so_many_arenas_memory_is_ordinary(
    ends: Ends, outgoing: SentPayloads
) -> None:
    outgoing.come_up(shared_arenas(ends[0], BOTH))
    arenas = [Arena(4096) for _ in range(ARENAS_MAX + 1)]
    descriptors = [outgoing.send(arena.buffer(4096).data, None) for arena in arenas]
    kinds = [decode(descriptor, 4096).kind for descriptor in descriptors]
    assert kinds == [PlaceKind.ARENA] * ARENAS_MAX + [PlaceKind.MEMORY]
    outgoing.close()
    for arena in arenas:
        arena.close()


def test_before_it_is_up_and_when_staging_is_full_places_are_told_later(
    ends: Ends, outgoing: SentPayloads
) -> None:
    payload = every_other(np.zeros(2 * MIB, np.uint8), 1 * KIB)
    room = STAGING_BYTES // MIB
    assert outgoing.send(payload, 0) == LATER
    assert outgoing.queued_bytes == MIB
    outgoing.come_up(shared_arenas(ends[0], BOTH))
    assert outgoing.queued_bytes == 0
    descriptors = [outgoing.send(payload, number) for number in range(1, room + 2)]
    assert descriptors[-2:] == [LATER, LATER]
    assert LATER not in descriptors[:-2]
    assert outgoing.queued_bytes == 2 * MIB
    # What comes behind is told later as well, although it needs no room.
    assert outgoing.send(memoryview(bytearray(100)), "last") == LATER
    assert outgoing.read(READ_COUNT.pack(1)) == [0]
    outgoing.place_later()
    assert outgoing.queued_bytes == MIB + 100
    assert outgoing.read(READ_COUNT.pack(3)) == [1, 2]
    outgoing.place_later()
    assert outgoing.queued_bytes == 0
    placed = [r for r in ends[1].receive()[0] if r.kind is LocalMessageType.PLACED]
    assert len(placed) == 4


@pytest.mark.parametrize("count", [0, 3, 2**64 - 1])
def test_what_cannot_have_been_read_is_refused(
    ends: Ends, outgoing: SentPayloads, count: int
) -> None:
    outgoing.come_up(shared_arenas(ends[0], BOTH))
    for number in range(2):
        outgoing.send(memoryview(bytearray(100)), number)
    with pytest.raises(ProtocolError, match="payloads as read, but only 0"):
        outgoing.read(READ_COUNT.pack(count))


@pytest.mark.parametrize("body", [b"", b"\1", bytes(9)])
def test_an_acknowledgement_is_8_bytes(outgoing: SentPayloads, body: bytes) -> None:
    with pytest.raises(ProtocolError, match="payloads as read"):
        outgoing.read(body)


_RING = 1 << 16


def payload(number: int, nbytes: int) -> memoryview:
    return np.full(nbytes, number % 251 + 1, np.uint8).data


@given(st.lists(st.one_of(st.none(), st.integers(1, _RING)), max_size=60))
def test_placed_payloads_keep_their_bytes(steps: list[int | None]) -> None:
    """None gives the oldest room back; a number is a payload of so many bytes."""
    ring = Staging(_RING)
    placed: deque[tuple[int, int, int]] = deque()
    try:
        for number, step in enumerate(steps):
            if step is None:
                if placed:
                    placed.popleft()
                    ring.give_back()
                continue
            begin = ring.place(payload(number, step))
            if begin is not None:
                placed.append((number, begin, step))
            elif not placed:
                raise AssertionError("an empty ring has no room")
            for which, at, nbytes in placed:
                assert_holds(ring, at, payload(which, nbytes))
    finally:
        ring.close()


def assert_holds(ring: Staging, begin: int, expected: memoryview) -> None:
    first = begin - MID_PAGE_BYTES
    assert ring._view[first : first + len(expected)] == expected


def test_a_longer_payload_waits_for_a_larger_ring() -> None:
    ring = Staging(_RING)
    assert ring.place(payload(1, 100)) == MID_PAGE_BYTES
    first = ring.arena
    assert ring.place(payload(2, _RING + 1)) is None
    ring.give_back()
    assert ring.place(payload(2, _RING + 1)) == MID_PAGE_BYTES
    assert ring.arena is not first
    assert first is not None
    assert first.closed
    ring.close()
    assert ring.arena is None
    ring.close()


# --- what is received: in order, in batches, and only from where it can be ------------


HERE = PeerProcess(os.getpid(), os.geteuid())
COOKIE = b"fedcba9876543210"


def incoming() -> ReceivedPayloads:
    """One that reads this process."""
    found = ReceivedPayloads()
    found.peer = PeerMemory(HERE, address_of(COOKIE), COOKIE)
    return found


def landing(nbytes: int) -> Landing:
    return Landing(nbytes, memoryview(bytearray(nbytes)))


def descriptor_of(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bytes:
    return encode_piece(PlaceKind.MEMORY, 0, memory.ctypes.data, memory.size)


def drain(inc: ReceivedPayloads) -> list[list[Landing]]:
    """All batches."""
    batches = []
    while inc.can_read:
        batches.append(inc.read())
    return batches


def test_what_was_put_off_waits_for_its_place() -> None:
    inc = incoming()
    memory = np.arange(100, dtype=np.uint8)
    late, soon = landing(100), landing(100)
    inc.receive(LATER, late)
    inc.receive(descriptor_of(memory), soon)
    assert not inc.can_read
    inc.placed(descriptor_of(memory))
    assert drain(inc) == [[late, soon]]
    assert late.payload == memory.data


def test_a_place_may_be_told_before_it_is_asked_for() -> None:
    inc = incoming()
    memory = np.arange(100, dtype=np.uint8)
    inc.placed(descriptor_of(memory))
    inc.receive(LATER, landing(100))
    assert len(drain(inc)) == 1


@pytest.mark.parametrize(
    ("place", "why"),
    [(LATER, "deferred the same place twice"), (b"nonsense", "invalid descriptor")],
)
def test_a_place_that_is_none_is_refused(place: bytes, why: str) -> None:
    inc = incoming()
    inc.receive(LATER, landing(100))
    inc.placed(place)
    with pytest.raises(ProtocolError, match=f"local: .*{why}"):
        inc.read()


def test_more_places_than_payloads_are_refused() -> None:
    inc = incoming()
    for _ in range(LANE_PAYLOADS_MAX):
        inc.placed(LATER)
    with pytest.raises(ProtocolError, match="more descriptors than payloads"):
        inc.placed(LATER)
