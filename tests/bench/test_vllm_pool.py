"""The trace of tests/bench/vllm_pool.py; in vLLM's environment on vLLM's pool as well."""

from __future__ import annotations

import importlib.util

import pytest

from tests.bench.vllm_pool import POOL_BLOCKS, OurPool, TheirPool, replay, trace


def test_the_pool_is_too_small_for_the_trace_and_keeps_what_is_asked_for() -> None:
    requests = trace()
    hits = replay(OurPool(POOL_BLOCKS), requests)
    everything = sum(map(len, requests))
    assert len({name for chain in requests for name in chain}) > POOL_BLOCKS
    assert everything / 3 < sum(hits) < everything


def test_both_find_the_same_blocks() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed here; `make test-vllm` installs it")
    requests = trace(seed=2)
    ours = replay(OurPool(POOL_BLOCKS), requests)
    assert ours == replay(TheirPool(POOL_BLOCKS), requests)
