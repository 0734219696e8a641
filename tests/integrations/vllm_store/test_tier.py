"""The tier of vLLM's own offloading, against its released interface.

`make test-vllm` runs this; without vLLM every test is skipped. No engine: vLLM 0.32
offloads from GPUs only.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvwire.errors import UsageError
from tests.support.waiting import eventually

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test-vllm` installs it",
        allow_module_level=True,
    )

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, while it is imported
    import vllm
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(4)]
ASKS = ReqContext("r")


@pytest.fixture
def memory() -> Any:
    return np.arange(8 * 4096, dtype=np.uint16).view(np.uint8).reshape(8, 8192).copy()


def make(memory: Any, folder: Path, model: str = "", **more: Any) -> Any:
    """As vLLM makes one, by the path of its module."""
    said = {
        "type": "KvwireTier",
        "module_path": "kvwire.integrations.vllm_store.tier",
        "tiers": ["memory:1MiB", f"disk:{folder}/kv?size=1MiB"],
        **more,
    }
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layers.0",), 0),),
        worker_kv_bytes_per_block=8192,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="0",
        model=OffloadingModelConfig(model, "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
    )
    spec, view = SimpleNamespace(config=config), memoryview(memory)
    return SecondaryTierFactory.create_secondary_tier(said, view, spec)


@pytest.fixture
def tier(memory: Any, tmp_path: Path) -> Iterator[Any]:
    made = make(memory, tmp_path, name="m")
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


def test_weights_set_chunks_apart(memory: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for weights, found in ((b"one", "MISS"), (b"one", "HIT"), (b"two", "MISS")):
        (model / "model.bin").write_bytes(weights)
        made = make(memory, tmp_path, str(model))
        assert answer(made, KEYS[0]) is LookupResult[found]
        made.submit_store(job(1, KEYS[:1], [3], load=False))
        made.drain_jobs()
        made.shutdown()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, 'neither a path nor a repository.*set "name"'),
        ({"name": "m", "tiers": ["memory:64KiB?slab=4KiB"]}, "8192 bytes has no room"),
    ],
)
def test_what_cannot_work_is_refused(
    memory: Any, tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        make(memory, tmp_path, "no-such/model", **more)


def test_a_release_that_was_not_tested(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    with pytest.raises(UsageError, match=r"^vLLM 0\.33\.0: "):
        make(memory, tmp_path, name="m")
    make(memory, tmp_path, name="m", untested_vllm=True).shutdown()


def test_a_request_that_ends_leaves_nothing(tier: Any) -> None:
    tier.on_new_request(ASKS)
    tier.lookup(KEYS[0], ASKS)
    tier.on_request_finished(ASKS)
    assert not tier._asked
