"""What is received: in order, in batches, and only from where it can be."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvwire.backend import Landing
from kvwire.errors import ProtocolError
from kvwire.limits import LANE_PAYLOADS_MAX
from kvwire.memory.copy import address_of
from kvwire_local.descriptor import LATER, PlaceKind, encode_piece
from kvwire_local.peer import PeerMemory
from kvwire_local.received_payloads import ReceivedPayloads
from kvwire_local.wire import PeerProcess

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
