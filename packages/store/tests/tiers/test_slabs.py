"""Slots of several sizes in one room."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.limits import KIB, MIB
from kvwire_store.address import TierAddress
from kvwire_store.tiers.slabs import GRAIN_BYTES, Slabs, rounded

SLAB = 16 * GRAIN_BYTES


def test_slots_of_one_slab_lie_side_by_side() -> None:
    slabs = Slabs(2, SLAB)
    slots = slabs.take(2 * GRAIN_BYTES, 8)
    assert np.diff(slabs.begins[slots]).tolist() == [2 * GRAIN_BYTES] * 7
    assert slabs.free(2 * GRAIN_BYTES) == 8
    assert slabs.free(GRAIN_BYTES) == 16


def test_a_slab_that_is_empty_belongs_to_no_size() -> None:
    slabs = Slabs(1, SLAB)
    slots = slabs.take(3 * GRAIN_BYTES, 9)
    assert slots.size == slabs.capacity(3 * GRAIN_BYTES) == 5
    assert slabs.take(GRAIN_BYTES, 1).size == 0
    slabs.give(slots[1:])
    assert slabs.take(GRAIN_BYTES, 1).size == 0
    slabs.give(slots[:1])
    assert slabs.take(GRAIN_BYTES, 99).size == 16


def test_restored_slots_are_not_given_out() -> None:
    slabs = Slabs(2, SLAB)
    slabs.restore(1, 4 * GRAIN_BYTES, np.array([16, 18]))
    taken = slabs.take(4 * GRAIN_BYTES, 99)
    assert sorted(taken.tolist()) == [0, 1, 2, 3, 17, 19]
    assert slabs.used_bytes == 2 * SLAB


@given(st.data())
def test_no_two_slots_overlap(data: st.DataObject) -> None:
    """Whatever is taken and given back, against a list of byte ranges."""
    slabs = Slabs(4, SLAB)
    live: dict[int, tuple[int, int]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        giving = bool(live) and data.draw(st.integers(0, 1)) == 1
        if giving:
            back = data.draw(st.lists(st.sampled_from(sorted(live)), unique=True))
            slabs.give(np.array(back, np.int64))
            for slot in back:
                del live[slot]
            continue
        slot_bytes = rounded(data.draw(st.integers(1, SLAB)))
        free = slabs.free(slot_bytes)
        count = data.draw(st.integers(1, 20))
        slots = slabs.take(slot_bytes, count)
        assert slots.size == min(count, free)
        for slot, begin in zip(slots, slabs.begins[slots], strict=True):
            assert slot not in live
            live[int(slot)] = int(begin), int(begin) + slot_bytes
        ranges = sorted(live.values())
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))
        assert not ranges or (ranges[0][0] >= 0 and ranges[-1][1] <= 4 * SLAB)
    assert slabs.used_bytes == sum(end - begin for begin, end in live.values())


@pytest.mark.parametrize("size", ["64KiB", "1MiB", "1GiB", "3GiB", "64GiB"])
def test_small_blocks_fill_a_tier_of_any_size(size: str) -> None:
    """Of 16 KiB on, without slabs of their own size."""
    address = TierAddress.parse(f"memory:{size}")
    nbytes = address.size(address.place)
    slab = address.slab_bytes(nbytes)
    slabs = Slabs(nbytes // slab, slab)
    for block in (2 * KIB, 4 * KIB, 16 * KIB, 64 * KIB):
        used = len(slabs) * slabs.capacity(rounded(block)) * block
        assert (2 * used > nbytes) == (not slabs.news_of(block)) or block > slab
        if block >= 16 * KIB and block <= slab:
            assert used == nbytes


def test_who_uses_little_of_a_tier_is_told_so_once() -> None:
    slabs = Slabs(16, 64 * MIB)
    said = slabs.news_of(4 * KIB)
    assert "can use 25.0% of it" in said
    assert said.endswith("open it with ?slab=16384KiB")
    assert not slabs.news_of(4 * KIB)
    assert not Slabs(64, 16 * MIB).news_of(4 * KIB)


def test_blocks_smaller_than_a_page_are_told_what_they_take() -> None:
    """What they fill is their own bytes, not the pages that they take."""
    assert "can use 12.5% of it, since each takes 4096 bytes, and" in (
        said := Slabs(16, 64 * MIB).news_of(2 * KIB)
    )
    assert said.endswith("open it with ?slab=16384KiB")
    said = Slabs(16, 4 * MIB).news_of(2 * KIB)
    assert "can use 50.0% of it" in said
    assert "?slab" not in said
    assert not Slabs(16, 4 * MIB).news_of(3 * KIB)


def test_blocks_that_waste_a_little_twice_are_told_why() -> None:
    """Each takes less than twice its bytes, and they fill more than half of a slab."""
    said = Slabs(16, 24 * MIB).news_of(2560)
    assert "can use 41.7% of it, since a slab of 24 MiB has at most 4096 blocks" in said
    said = Slabs(16, 12 * KIB).news_of(5000)
    assert said.endswith("can use 40.7% of it, since each takes 8192 bytes")
