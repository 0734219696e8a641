"""Slots of several sizes in one room."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

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
