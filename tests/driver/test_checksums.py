"""Which payloads are sent with a checksum, and which of them are the ones sent."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from kvwire.driver.checksums import (
    SAMPLED_ONE_IN,
    SHORT_BYTES,
    CheckMode,
    ChecksumPolicy,
    ScratchPool,
    arrived,
    landing_for,
    matches,
)
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB, LINK_QUEUE_BYTES, MIB
from kvwire.memory.checksum import checksum
from kvwire.types import Device, MemoryKind
from kvwire.wire.header import Flag, FrameType, Header, decode_header, encode_header

SHORT, LONG = (memoryview(bytes(n)) for n in (SHORT_BYTES, SHORT_BYTES + 1))
MANY = 4000

Bytes = npt.NDArray[np.uint8]


def header(check: int | None) -> Header:
    flags = 0 if check is None else int(Flag.CHECKED)
    return decode_header(
        encode_header(FrameType.DATA, flags, 0, 1, payload_check=check or 0)
    )


def checked(checks: ChecksumPolicy, payload: memoryview, count: int) -> list[int]:
    """The numbers of those of so many payloads that have a checksum."""
    return [i for i in range(count) if checks.of(payload) is not None]


@pytest.mark.parametrize(
    ("mode", "short", "long", "intact"),
    [
        ("auto", MANY, MANY, MANY // SAMPLED_ONE_IN),
        ("on", MANY, MANY, MANY),
        ("off", 0, 0, 0),
        ("sampled", MANY, MANY // SAMPLED_ONE_IN, MANY // SAMPLED_ONE_IN),
    ],
)
def test_how_many_are_checked(
    mode: CheckMode, short: int, long: int, intact: int
) -> None:
    """Those that go from memory to memory come intact, and are sampled at most."""
    assert len(checked(ChecksumPolicy(mode), SHORT, MANY)) == short
    assert abs(len(checked(ChecksumPolicy(mode), LONG, MANY)) - long) <= 1
    checks = ChecksumPolicy(mode)
    found = [i for i in range(MANY) if checks.of(LONG, intact=True) is not None]
    assert abs(len(found) - intact) <= 1


def test_the_first_is_checked_and_the_longest_gap_is_known() -> None:
    numbers = checked(ChecksumPolicy("sampled"), LONG, MANY)
    assert numbers[0] == 0
    assert max(b - a for a, b in itertools.pairwise(numbers)) == 13


@pytest.mark.parametrize("period", [2, 8, 13, 16, 32, 80, 100])
def test_no_place_in_a_transfer_is_passed_over_for_ever(period: int) -> None:
    """Transfers of the same number of chunks, such as one for each layer."""
    numbers = checked(ChecksumPolicy("sampled"), LONG, MANY)
    assert {number % period for number in numbers} == set(range(period))


def test_it_is_the_checksum_of_the_payload() -> None:
    check = ChecksumPolicy("on").of(SHORT)
    assert check == checksum(SHORT)
    assert matches(SHORT, header(check))
    damaged = memoryview(bytes(SHORT_BYTES - 1) + b"x")
    assert not matches(damaged, header(check))
    assert matches(damaged, header(None))
    assert matches(None, header(check))


def test_memory_of_a_device_is_not_touched() -> None:
    where = np.array([8], np.uint64)
    device = Device(MemoryKind.CUDA, 0)
    there = Fragments(where, where, owner=None, writable=True, device=device)
    assert ChecksumPolicy("on").of(there) is None
    assert matches(there, header(1))


def pieces(memory: Bytes, piece_bytes: int) -> Fragments:
    """Fragments of one length, the last first in memory."""
    count = memory.size // piece_bytes
    starts = np.arange(count, dtype=np.uint64)[::-1] * np.uint64(piece_bytes)
    return Fragments(
        starts + np.uint64(memory.ctypes.data),
        np.full(count, piece_bytes, np.uint64),
        owner=memory,
        writable=True,
    )


@pytest.mark.parametrize(("piece", "gathered"), [(512, True), (64 * KIB, False)])
def test_small_fragments_travel_as_a_copy(piece: int, gathered: bool) -> None:
    memory = np.random.default_rng(1).integers(0, 256, MIB, np.uint8)
    payload, copies = pieces(memory, piece), ScratchPool()
    sealed, check = ChecksumPolicy("on").seal(payload, copies, "chunk")
    assert check == checksum(payload) == checksum(sealed)
    assert isinstance(sealed, memoryview) == gathered
    assert copies.lent_bytes == (MIB if gathered else 0)


def test_what_is_not_checked_is_not_copied() -> None:
    payload, copies = pieces(np.zeros(MIB, np.uint8), 512), ScratchPool()
    assert ChecksumPolicy("off").seal(payload, copies, "chunk") == (payload, None)
    assert landing_for(payload, header(None), copies, "arrival") is payload
    assert copies.lent_bytes == 0


def test_small_fragments_get_their_bytes_once_they_are_intact() -> None:
    memory = np.zeros(MIB, np.uint8)
    place, copies = pieces(memory, 512), ScratchPool()
    sent = np.random.default_rng(2).integers(0, 256, MIB, np.uint8)
    head = header(checksum(sent.data))
    received = landing_for(place, head, copies, "arrival")
    assert isinstance(received, memoryview)
    received[:] = sent.data
    received[5] ^= 1
    assert not arrived(received, place, head)
    assert not memory.any()
    received[5] ^= 1
    assert arrived(received, place, head)
    assert (memory.reshape(-1, 512)[::-1].reshape(-1) == sent).all()


def test_what_was_received_in_its_place_stays_there() -> None:
    place = memoryview(bytearray(b"abc"))
    assert arrived(place, place, header(checksum(place)))
    assert not arrived(place, place, header(1))
    assert arrived(None, None, header(1))


# --- memory for copies


def test_what_was_given_back_is_used_again() -> None:
    copies = ScratchPool()
    first = copies.room(MIB, "a")
    where = np.frombuffer(first, np.uint8).ctypes.data
    copies.give_back("a")
    second = copies.room(MIB - 5, "b")
    assert np.frombuffer(second, np.uint8).ctypes.data == where
    assert (len(first), len(second)) == (MIB, MIB - 5)


def test_two_owners_never_share() -> None:
    copies = ScratchPool()
    rooms = [copies.room(3, owner) for owner in range(4)]
    for number, room in enumerate(rooms):
        room[:] = bytes([number] * 3)
    assert [bytes(room) for room in rooms] == [bytes([n] * 3) for n in range(4)]
    assert copies.lent_bytes == 4 * 64 * KIB


def test_a_spare_that_is_too_small_is_left() -> None:
    copies = ScratchPool()
    copies.room(64 * KIB, "small")
    copies.give_back("small")
    assert len(copies.room(MIB, "large")) == MIB
    assert copies.spare_bytes == 64 * KIB


@pytest.mark.parametrize("trimmed", [False, True])
def test_what_is_kept_is_bounded(trimmed: bool) -> None:
    copies = ScratchPool()
    count = 4 * LINK_QUEUE_BYTES // MIB
    for owner in range(count):
        copies.room(MIB, owner)
    for owner in range(count):
        copies.give_back(owner)
    assert copies.lent_bytes == 0
    assert copies.spare_bytes == 2 * LINK_QUEUE_BYTES
    if trimmed:
        copies.trim()
        assert copies.spare_bytes == 0
        assert len(copies.room(MIB, "again")) == MIB
