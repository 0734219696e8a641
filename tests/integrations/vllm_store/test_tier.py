"""The tier of vLLM's own offloading, against its released interface.

`make test-vllm` runs this; without vLLM every test is skipped. No engine: vLLM 0.32
offloads from GPUs only.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.waiting import eventually

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test-vllm` installs it",
        allow_module_level=True,
    )

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, while it is imported
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(4)]
ASKS = ReqContext("r")


@pytest.fixture
def memory() -> Any:
    return np.arange(8 * 4096, dtype=np.uint16).view(np.uint8).reshape(8, 8192).copy()


@pytest.fixture
def tier(memory: Any, tmp_path: Path) -> Iterator[Any]:
    """As vLLM makes one, by the path of its module."""
    said = {
        "type": "KvwireTier",
        "module_path": "kvwire.integrations.vllm_store.tier",
        "tiers": ["memory:1MiB", f"disk:{tmp_path}?size=1MiB"],
    }
    made = SecondaryTierFactory.create_secondary_tier(said, memoryview(memory), None)
    yield made
    made.shutdown()


def answer(tier: Any, key: Any) -> Any:
    found: list[Any] = []

    def known() -> bool:
        found.append(tier.lookup(key, ASKS))
        return found[-1] is not LookupResult.RETRY

    assert eventually(known)
    return found[-1]


def job(number: int, keys: list[Any], chunks: list[int], *, load: bool) -> Any:
    return TransferJob(number, keys, np.array(chunks), load, ASKS)


def test_chunks_are_kept_and_come_back(tier: Any, memory: Any) -> None:
    assert answer(tier, KEYS[0]) is LookupResult.MISS
    tier.submit_store(job(1, KEYS[:2], [3, 5], load=False))
    tier.drain_jobs()
    kept = memory[[3, 5]].copy()
    memory[:] = 0  # nothing touches it any more
    (result,) = tier.get_finished_jobs()
    assert (result.job_id, result.success) == (1, True)
    assert result.transfer_bytes == 2 * 8192
    assert answer(tier, KEYS[1]) is LookupResult.HIT
    tier.submit_load(job(2, KEYS[:3], [0, 7, 1], load=True))
    assert tier.has_pending_work()
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    assert (result.job_id, result.success) == (2, False)
    assert result.successful_keys == KEYS[:2]
    assert (memory[[0, 7]] == kept).all()
    assert not tier.has_pending_work()
    assert not list(tier.get_finished_jobs())


def test_a_request_that_ends_leaves_nothing(tier: Any) -> None:
    tier.on_new_request(ASKS)
    tier.lookup(KEYS[0], ASKS)
    tier.on_request_finished(ASKS)
    assert not tier._asked
