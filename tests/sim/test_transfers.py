"""Transfers over several links in virtual time: nothing wrong, and bugs are found."""

from __future__ import annotations

import pytest

from kvwire.kv.landed import Landed
from kvwire.transfers import receiver
from tests.sim.transfers import run_seed
from tests.support.depth import sample

SEEDS = range(200)


@pytest.mark.parametrize("seed", list(sample(SEEDS, 12)))
def test_no_byte_is_wrong_or_late_and_no_claim_false(seed: int) -> None:
    life = run_seed(seed)
    assert not life.failed
    assert life.counts["complete"]


def test_links_are_cut_and_transfers_resumed() -> None:
    """Else the seeds would show little."""
    counts = run_seed(4).counts
    assert counts["connections cut"] > 1
    assert counts["complete"] > counts.get("partial", 0)


@pytest.mark.parametrize("seed", [4, 8])
def test_a_seed_is_the_same_again(seed: int) -> None:
    assert run_seed(seed) == run_seed(seed)


def test_damaged_chunks_that_count_as_landed_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiver, "missing_chunks", lambda core, chunk_bytes: [])
    assert any("wrong bytes" in run_seed(seed).failed for seed in range(10))


def test_a_resumed_transfer_that_takes_all_for_landed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_of_it(landed: Landed, boxes: object) -> None:
        landed.mark_granules(0, slice(None))  # type: ignore[arg-type]

    monkeypatch.setattr(Landed, "mark_boxes", all_of_it)
    assert any("false reports" in run_seed(seed).failed for seed in range(10))
