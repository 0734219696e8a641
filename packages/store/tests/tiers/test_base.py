"""What every tier is given, and what it counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire_store.images import images_in
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
