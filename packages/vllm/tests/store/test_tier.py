"""The tier of vLLM's own offloading, against its released interface.

`make test-vllm` runs this; without vLLM every test is skipped. No engine: vLLM 0.32
offloads from GPUs only.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvwire.errors import UsageError
from kvwire_vllm import plugin
from tests.support.waiting import eventually

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test-vllm` installs it",
        allow_module_level=True,
    )

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, while it is imported
    import vllm
    import vllm.distributed.kv_transfer.kv_connector.factory  # for `plugin`
    from vllm.v1.kv_offload.base import (
        LookupResult,
        ReqContext,
        ScheduleEndContext,
        make_offload_key,
    )
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    from vllm.v1.kv_offload.tiering.manager import (
        CPUPrimaryTierOffloadingManager,
        TieringOffloadingManager,
    )

DETECTOR = "EMABackpressureDetector"
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(4)]
ASKS = ReqContext("r")


@pytest.fixture
def memory() -> Any:
    return np.arange(8 * 4096, dtype=np.uint16).view(np.uint8).reshape(8, 8192).copy()


def make(memory: Any, folder: Path, model: str = "", **more: Any) -> Any:
    """As vLLM makes one, by its name."""
    plugin.register()
    said = {
        "type": "KvwireTier",
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


def test_calls_come_from_any_thread(tier: Any, memory: Any) -> None:
    """One at a time, as vLLM 0.33 calls tiers under its manager's lock."""

    def elsewhere(call: Callable[..., Any], *arguments: Any) -> Any:
        with ThreadPoolExecutor(1) as another:
            return another.submit(call, *arguments).result()

    elsewhere(tier.submit_store, job(1, KEYS[:2], [3, 5], load=False))
    elsewhere(tier.drain_jobs)
    (result,) = elsewhere(lambda: list(tier.get_finished_jobs()))
    assert (result.job_id, result.success) == (1, True)
    kept = memory[[3, 5]].copy()
    memory[:] = 0
    assert eventually(lambda: elsewhere(tier.lookup, KEYS[1], ASKS) is LookupResult.HIT)
    elsewhere(tier.submit_load, job(2, KEYS[:2], [0, 7], load=True))
    elsewhere(tier.drain_jobs)
    (result,) = elsewhere(lambda: list(tier.get_finished_jobs()))
    assert (result.job_id, result.success) == (2, True)
    assert (memory[[0, 7]] == kept).all()
    elsewhere(tier.on_request_finished, ASKS)


@pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")
def test_a_primary_tier_of_several_files(tmp_path: Path) -> None:
    """As vLLM 0.33 maps one from 2 GiB on: one after the other, in one range."""
    with mapped_files(2, 4 * 8192) as memory:
        rows = memory.reshape(8, 8192)
        rows[:] = np.arange(8, dtype=np.uint8)[:, None]
        made = make(rows, tmp_path, name="m")
        try:
            made.submit_store(job(1, KEYS, [2, 3, 4, 5], load=False))
            made.drain_jobs()
            assert [one.success for one in made.get_finished_jobs()] == [True]
            rows[:] = 0
            made.submit_load(job(2, KEYS, [6, 4, 3, 1], load=True))
            made.drain_jobs()
            assert [one.success for one in made.get_finished_jobs()] == [True]
        finally:
            made.shutdown()
        assert rows[:, 0].tolist() == [0, 5, 0, 4, 3, 0, 2, 0]
        assert (rows == rows[:, :1]).all()


@contextmanager
def mapped_files(count: int, size: int) -> Iterator[Any]:
    """Map files one behind the other; yield the bytes of all."""
    whole = mmap.mmap(-1, count * size)
    memory = np.frombuffer(whole, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    for index in range(count):
        file = os.memfd_create(f"part {index}")
        os.truncate(file, size)
        where = ctypes.c_void_p(memory.ctypes.data + index * size)
        flags = mmap.MAP_SHARED | _MAP_FIXED
        access = mmap.PROT_READ | mmap.PROT_WRITE
        got = libc.mmap(
            *(where, ctypes.c_size_t(size), access, flags, file, ctypes.c_long(0))
        )
        os.close(file)
        assert got == where.value, os.strerror(ctypes.get_errno())
    yield memory


_MAP_FIXED = 0x10


def test_labels_of_its_configuration(memory: Any, tmp_path: Path) -> None:
    disk = f"disk:{tmp_path}/kv?size=1MiB"
    made = make(memory, tmp_path, name="m", tiers=["memory:1MiB", disk], write="back")
    made.shutdown()
    assert tuple(made.config_info()) == made.config_info_keys({})
    assert made.config_info() == {
        "kvwire_tiers": f"memory:1MiB {disk}",
        "kvwire_write": "back",
    }


def test_failed_stores_are_counted(memory: Any, tmp_path: Path) -> None:
    """By vLLM's detector of back-pressure, which the tier hands on."""
    more: dict[str, Any] = {"backpressure": {"backpressure_cls": DETECTOR}}
    made = make(memory, tmp_path, name="m", **more)
    made.shutdown()
    assert type(made.bp_detector).__name__ == DETECTOR


@pytest.mark.skipif(
    not hasattr(BackpressureDetector, "on_store_failed"),
    reason=f"vLLM {vllm.__version__} does not count failed stores",
)
def test_back_pressure_in_vllms_own_manager(memory: Any, tmp_path: Path) -> None:
    """Stores that fail let it store less, and it frees the chunks of each."""
    detector = {"backpressure_cls": DETECTOR, "failure_threshold": 3}
    more: Any = {"backpressure": detector | {"decay_half_life_s": 1e9}}
    tier = make(memory, tmp_path, name="m", **more)
    view = memoryview(memory)
    region = SimpleNamespace(create_kv_memoryview=lambda: view, cleanup=lambda: None)
    primary = CPUPrimaryTierOffloadingManager(len(memory), region)
    manager = TieringOffloadingManager(primary, [tier])
    numbers = iter(range(256))

    def store() -> bool:
        """Bring a chunk from the GPU; return whether it goes to the tier."""
        number = next(numbers)
        key, asks = make_offload_key(bytes([number]) * 32, 0), ReqContext(f"r{number}")
        manager.on_new_request(asks)
        assert manager.prepare_store([key], asks).keys_to_store == [key]
        manager.on_schedule_end(ScheduleEndContext((), ()))
        manager.complete_store([key], asks)
        tier.drain_jobs()
        manager.on_request_finished(asks)
        begun: bool = tier.has_pending_work()
        manager.on_schedule_end(ScheduleEndContext((), ()))
        assert not tier.has_pending_work()
        return begun

    try:
        assert [store() for _ in range(4)] == [True] * 4
        assert not tier.bp_detector.is_under_pressure()
        shutil.rmtree(tmp_path / "kv")
        assert [store() for _ in range(3)] == [True] * 3
        assert tier.bp_detector.is_under_pressure()
        # More than the primary tier holds, so each has to let go of another.
        assert not any(store() for _ in range(2 * len(memory)))
        assert tier.bp_detector.policy.pop_stores_dropped() == (16, 16)
    finally:
        manager.shutdown()


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
    for version in ("0.30.0", "0.34.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        with pytest.raises(UsageError, match=r"tested with 0\.31 to 0\.33"):
            make(memory, tmp_path, name="m")
    make(memory, tmp_path, name="m", untested_vllm=True).shutdown()


def test_a_request_that_ends_leaves_nothing(tier: Any) -> None:
    tier.on_new_request(ASKS)
    tier.lookup(KEYS[0], ASKS)
    tier.on_request_finished(ASKS)
    assert not tier._asked
