"""What every tier is given, what it counts, and images in memory."""

from __future__ import annotations

import ctypes
from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.kv.fragments import Fragments
from kvwire.limits import MIB
from kvwire_store.images import (
    image_sums,
    images_in,
    line_of,
    named_sums,
    payload_of,
    views_of,
)
from kvwire_store.keys import as_keys
from kvwire_store.limits import STORE_LOG_AGAIN_S
from kvwire_store.tiers import base
from kvwire_store.tiers.base import Batch, BlockResult, TierStats
from packages.store.tests.fakes import FakeTier
from tests.support.logs import warned


@given(st.integers(1, 12), st.data())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_selection_keeps_key_order_and_image_together(
    count: int, data: st.DataObject
) -> None:
    memory = np.repeat(np.arange(count, dtype=np.uint8), 8)
    batch = Batch(
        as_keys(b"%d" % at for at in range(count)),
        np.arange(count, dtype=np.uint8),
        images_in(memory, 8, count),
    )
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    by_mask, by_position = batch.selected(mask), batch.selected(np.flatnonzero(mask))
    for part in (by_mask, by_position):
        places = np.flatnonzero(mask).tolist()
        assert part.keys.tolist() == [b"%d" % at for at in places]
        assert part.orders.tolist() == places
        begins = part.images.addresses - np.uint64(memory.ctypes.data)
        assert (begins // 8).tolist() == places
        assert part.images.owner is memory


def test_trouble_is_one_line_when_it_begins_and_one_when_it_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(base, "monotonic", lambda: now)
    tier = FakeTier("below")
    for text in ("", "full", "full", "fails", ""):
        tier.error = text
    assert warned(caplog) == ["tier below: full", "tier below works again"]
    caplog.clear()
    for text in ("full", "", "full", "", "full"):
        tier.error = text
    assert warned(caplog) == [], "it comes and goes with each call"
    now += STORE_LOG_AGAIN_S + 1
    for text in ("full", ""):
        tier.error = text
    assert warned(caplog) == ["tier below: full", "tier below works again"]


@given(st.lists(st.sampled_from(BlockResult)), st.booleans())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_each_fate_is_counted_once(results: list[BlockResult], written: bool) -> None:
    """Blocks that are missing or refused are in no number of a tier."""
    stats, seen = TierStats(), Counter(results)
    stats.count(np.array(results, np.uint8), written=written)
    assert stats.written_blocks == (seen[BlockResult.LANDED] if written else 0)
    assert stats.read_blocks == (0 if written else seen[BlockResult.LANDED])
    assert stats.damaged_blocks == seen[BlockResult.DAMAGED]
    assert stats.failed_blocks == seen[BlockResult.FAILED]
    assert stats.evicted_blocks == 0


# --- images in memory -----------------------------------------------------------------


def test_images_side_by_side_are_one_view() -> None:
    memory = np.arange(300).astype(np.uint8)
    images = images_in(memory, 100, 3)
    payload = payload_of(images)
    assert isinstance(payload, memoryview)
    assert payload == memory.data
    apart = payload_of(images.selected(np.array([0, 2])))
    assert isinstance(apart, Fragments)
    assert b"".join(views_of(apart)) == memory[:100].tobytes() + memory[200:].tobytes()


def test_a_copy_of_images_wherever_they_are() -> None:
    memory = np.arange(300).astype(np.uint8)
    images = images_in(memory, 100, 3)
    apart = images.selected(np.array([2, 0]))
    assert line_of(apart) == memory[200:].tobytes() + memory[:100].tobytes()
    assert line_of(images) == memory.tobytes()
    assert not line_of(images.selected(np.zeros(3, np.bool_)))


@given(st.integers(1, 5), st.integers(1, 3 * MIB // 2))
@settings(max_examples=25)
def test_the_checksum_of_each_image(count: int, nbytes: int) -> None:
    """Whether many of them fit in a turn or one is longer than it."""
    rng = np.random.default_rng(nbytes)
    memory = rng.integers(0, 256, count * nbytes, np.uint8)
    images = images_in(memory, nbytes, count)
    sums = image_sums(images)
    for number, view in enumerate(views_of(images)):
        begin = memory.ctypes.data + number * nbytes
        image = ctypes.string_at(begin, nbytes)
        assert view == image
        assert sums[number] == xxhash.xxh3_64_intdigest(image)


def test_another_key_or_order_has_another_checksum() -> None:
    keys = as_keys([b"k" * 48, b"k" * 47 + b"l", b"k" * 48])
    sums = named_sums(keys, np.array([0, 0, 1], np.uint8))
    assert len(set(sums.tolist())) == 3
    assert named_sums(keys[:1], np.zeros(1, np.uint8)).tolist() == sums[:1].tolist()
