"""The trace of tests/bench/vllm_pool.py, on kvwire's pool alone."""

from __future__ import annotations

from tests.bench.vllm_pool import POOL_BLOCKS, OurPool, replay, trace


def test_the_pool_is_too_small_for_the_trace_and_keeps_what_is_asked_for() -> None:
    requests = trace()
    hits = replay(OurPool(POOL_BLOCKS), requests)
    everything = sum(map(len, requests))
    assert len({name for chain in requests for name in chain}) > POOL_BLOCKS
    assert everything / 3 < sum(hits) < everything
