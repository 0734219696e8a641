"""What vLLM's log and Prometheus get."""

from __future__ import annotations

import numpy as np
import pytest

import kvwire
from kvwire.kv.blocks import BlockSet, MissingBlocks
from kvwire_vllm import metrics

OUTCOME = kvwire.Outcome(
    complete=True,
    landed=BlockSet({"kv": np.arange(3)}),
    missing=MissingBlocks({}, []),
    usable_prefix=3,
    usable_tokens=12,
    lists={"kv": np.arange(3)},
    tokens={"kv": 12},
    timings=kvwire.Timings(queue_s=2.0, wire_s=0.5),
    nbytes=3_000_000,
)


def test_what_is_noted_is_in_the_log_line() -> None:
    observed: metrics.Observed = {}
    metrics.observe_sent(observed, [OUTCOME.nbytes, OUTCOME.nbytes])
    metrics.observe_received(observed, [OUTCOME], 2)
    assert metrics.summary(observed) == {
        "prompts sent": 2,
        "prompts fetched": 1,
        "MB sent": 6.0,
        "MB fetched": 3.0,
        "blocks missing": 2,
        "median wait_s": 2.0,
        "median wire_s": 0.5,
    }


def test_why_prompts_did_not_move_is_in_the_log_line() -> None:
    observed: metrics.Observed = {}
    for reason in ("unreachable", "unreachable", "refused"):
        metrics.observe_received(observed, [], 3, reason)
    found = metrics.summary(metrics.added(observed, {"refused": [1.0]}))
    assert found["not moved, unreachable"] == 2
    assert found["not moved, refused"] == 2
    assert "not moved, missing" not in found


def test_how_far_behind_saves_are_is_in_the_log_line() -> None:
    observed: metrics.Observed = {}
    for name, value in (
        ("save_s", 0.1),
        ("save_s", 0.3),
        ("behind_blocks", 7),
        ("behind_blocks", 2),
        ("skipped_blocks", 4),
    ):
        metrics.observe(observed, name, value)
    assert metrics.store_summary(observed) == {
        "saves": 2,
        "most blocks behind": 7,
        "blocks not saved": 4,
        "median save_s": 0.2,
        "longest save_s": 0.3,
    }
    assert metrics.store_summary({})["saves"] == 0


def test_workers_add_up() -> None:
    first: metrics.Observed = {"sent_bytes": [1.0]}
    second: metrics.Observed = {"sent_bytes": [2.0], "wire_s": [3.0]}
    assert metrics.added(first, second) == {"sent_bytes": [1.0, 2.0], "wire_s": [3.0]}
    assert first == {"sent_bytes": [1.0]}
    assert metrics.summary({})["prompts sent"] == 0


@pytest.mark.parametrize("name", [*metrics.FIELDS, *metrics.STORE_FIELDS])
def test_every_field_has_buckets(name: str) -> None:
    assert list(metrics.buckets(name)) == sorted(set(metrics.buckets(name)))
