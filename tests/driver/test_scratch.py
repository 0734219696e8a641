"""Memory for copies: used again, given back once, and not kept by who is idle."""

from __future__ import annotations

import numpy as np
import pytest

from kvwire.driver.scratch import ScratchPool
from kvwire.limits import KIB, LINK_QUEUE_BYTES, MIB


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


def test_an_owner_that_has_nothing_may_give_it_back() -> None:
    copies = ScratchPool()
    copies.give_back("nobody")
    copies.room(1, "a")
    copies.give_back("a")
    copies.give_back("a")
    assert (copies.lent_bytes, copies.spare_bytes) == (0, 64 * KIB)


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
