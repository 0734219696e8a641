"""The L2 adapter, loaded by LMCache: its factory, and its server under an engine."""

from __future__ import annotations

import importlib.util
import json
import logging
import select
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvwire import UsageError
from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.serving import Process, engine, prompt, tokens_of
from packages.vllm.tests.support.store_server import StoreServer
from tests.support.servers import free_port
from tests.support.waiting import eventually

if importlib.util.find_spec("lmcache") is None:
    pytest.skip(
        "lmcache is not installed here; `make test-lmcache` installs it",
        allow_module_level=True,
    )

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, while it is imported
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import (
        PluginL2AdapterConfig,
        _create_plugin_adapter,
    )
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.platform.event_notifier import consume_fd
    from transformers.utils import logging as logging_of_transformers

CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector"
SHAPE = torch.Size((2, 4, 16, 8))
LAYOUT = {0: MemoryLayoutDesc([SHAPE], [torch.bfloat16])}
KEYS = [ObjectKey(bytes([number]) * 32, "m", 0) for number in range(4)]


def thing(value: float) -> Any:
    """An object of LMCache, in memory of its own."""
    raw = torch.full(SHAPE, value, dtype=torch.bfloat16).view(torch.uint8).flatten()
    said = MemoryObjMetadata(SHAPE, torch.bfloat16, 0, raw.numel(), 1)
    return TensorMemoryObj(raw, said, None)


def wait_for(fd: int) -> None:
    """Wait until LMCache's controller would be woken."""
    ready, _, _ = select.select([fd], [], [], 50)
    assert ready
    consume_fd(fd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def adapter(folder: Path, **more: Any) -> Any:
    more = more or {"fingerprint": "w"}
    tiers = ["memory:1MiB", f"disk:{folder}?size=1MiB"]
    return _create_plugin_adapter(
        PluginL2AdapterConfig.from_dict(
            {
                "module_path": "kvwire_engines.lmcache",
                "class_name": "KvwireL2Adapter",
                "adapter_params": {"tiers": tiers, **more},
            }
        )
    )


@pytest.fixture
def made(folder: Path) -> Iterator[Any]:
    one = adapter(folder)
    yield one
    one.close()


def bits(bitmap: Any, count: int) -> list[bool]:
    return [bitmap.test(index) for index in range(count)]


def store(made: Any, keys: list[Any], values: list[float]) -> Any:
    number = made.submit_store_task(keys, [thing(value) for value in values])
    wait_for(made.get_store_event_fd())
    return made.pop_completed_store_tasks()[number]


def lookup(made: Any, keys: list[Any]) -> list[bool]:
    number = made.submit_lookup_and_lock_task(keys, LAYOUT)
    wait_for(made.get_lookup_and_lock_event_fd())
    return bits(made.query_lookup_and_lock_result(number), len(keys))


def test_objects_outlive_the_adapter(folder: Path) -> None:
    first = adapter(folder)
    said = store(first, KEYS[:2], [1.5, 2.5])
    assert said.is_successful()
    assert said.bytes_transferred() == 2 * SHAPE.numel() * 2
    first.close()
    second = adapter(folder)
    assert lookup(second, KEYS[::-1]) == [False, False, True, True]
    objects = [thing(0), thing(0), thing(0)]
    number = second.submit_load_task([KEYS[1], KEYS[3], KEYS[0]], objects)
    wait_for(second.get_load_event_fd())
    bitmap = second.query_load_result(number)
    assert bits(bitmap, 3) == [True, False, True]
    assert second.query_load_result(number) is None  # once
    assert [float(one.tensor.flatten()[-1]) for one in objects] == [2.5, 0, 1.5]
    second.submit_unlock(KEYS)
    second.close()


def test_what_names_an_object_sets_it_apart(made: Any) -> None:
    store(made, KEYS[:1], [1.0])
    others = [
        ObjectKey(KEYS[0].chunk_hash, "another", 0),
        ObjectKey(KEYS[0].chunk_hash, "m", 1),
        ObjectKey(KEYS[0].chunk_hash, "m", 0, cache_salt="tenant"),
    ]
    assert lookup(made, [KEYS[0], *others]) == [True, False, False, False]


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"fingerprnt": "w"}, "unknown key 'fingerprnt'.*fingerprint"),
        ({"tiers": "memory:1MiB"}, "tiers='memory:1MiB': Expected `list`"),
        ({"write": "bak"}, "write='bak'.*back"),
    ],
)
def test_what_adapter_params_cannot_say(
    folder: Path, params: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=f"adapter_params: {why}"):
        adapter(folder, **params)


def test_weights_set_objects_apart(folder: Path, tmp_path: Path) -> None:
    """By the files of the model that keys name, or by what an operator calls them."""
    model = tmp_path / "model"
    model.mkdir()
    key = ObjectKey(KEYS[0].chunk_hash, str(model), 0)
    for weights, found in ((b"one", False), (b"one", True), (b"two", False)):
        (model / "model.bin").write_bytes(weights)
        one = adapter(folder, fingerprint="")
        assert lookup(one, [key]) == [found]
        store(one, [key], [1.0])
        one.close()
    named = adapter(folder, fingerprint="mine")
    assert lookup(named, [key]) == [False]
    named.close()


def test_nothing_is_kept_of_weights_without_a_name(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = adapter(folder, fingerprint="")
    with caplog.at_level(logging.ERROR, "kvwire"):
        for _ in range(2):
            assert not store(one, KEYS[:1], [1.0]).is_successful()
            assert lookup(one, KEYS[:1]) == [False]
    (said,) = caplog.messages
    assert 'set "fingerprint"' in said
    number = one.submit_load_task(KEYS[:1], [thing(0)])
    wait_for(one.get_load_event_fd())
    assert bits(one.query_load_result(number), 1) == [False]
    one.close()


def test_a_store_that_failed_is_told(made: Any) -> None:
    large = torch.zeros(4 * 1024 * 1024, dtype=torch.uint8)
    said = MemoryObjMetadata(large.shape, torch.uint8, 0, large.numel(), 1)
    number = made.submit_store_task(KEYS[:1], [TensorMemoryObj(large, said, None)])
    wait_for(made.get_store_event_fd())
    assert not made.pop_completed_store_tasks()[number].is_successful()
    assert made.get_usage().total_bytes_used == 0
    assert lookup(made, KEYS[:1]) == [False]


def test_a_listener_that_raises_keeps_nobody_waiting(made: Any) -> None:
    class Raises:
        def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
            raise RuntimeError("a listener's own")

        def on_l2_keys_accessed(self, keys: list[Any]) -> None:
            raise RuntimeError("a listener's own")

    made.register_listener(Raises())
    assert store(made, KEYS[:1], [1.5]).is_successful()
    number = made.submit_load_task(KEYS[:1], [thing(0)])
    wait_for(made.get_load_event_fd())
    assert bits(made.query_load_result(number), 1) == [True]


def test_an_engine_goes_on_with_what_lmcache_has_stored(tmp_path: Path) -> None:
    """vLLM and LMCache's server, both on CPUs, are killed; others go on."""
    logging_of_transformers.disable_progress_bar()  # it would leave a thread behind
    model = make_model("gqa", tmp_path)
    store = StoreServer(tmp_path)
    plugin = {
        "type": "plugin",
        "module_path": "kvwire_engines.lmcache",
        "class_name": "KvwireL2Adapter",
        "adapter_params": {"tiers": ["memory:16MiB", f"kvwire://{store.address}"]},
    }

    def answered(name: str) -> tuple[list[int], float]:
        """A prompt's answer by new servers, and how many tokens they fetched."""
        port, log = free_port(), tmp_path / f"{name}.lmcache"
        command = [sys.executable, "-m", "lmcache.cli.main", "server"]
        command += ["--port", str(port), "--http-port", str(free_port())]
        command += ["--supported-transfer-mode", "auto", "--chunk-size", "128"]
        # Metrics need a package of their own.
        command += ["--disable-metrics"]
        command += ["--l1-size-gb", "1", "--eviction-policy", "LRU"]
        command += ["--l2-adapter", json.dumps(plugin)]
        cache = Process(command, log, "", {"LMCACHE_TRACK_USAGE": "false"})
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_connector_extra_config": {"lmcache.mp.port": port},
        }
        one = engine(model, tmp_path, name, 0, {}, alone=connector)
        try:
            cache.start()
            up = eventually(lambda: "server is running..." in log.read_text())
            assert up, cache.tail()
            one.start()
            one.wait()
            answer = tokens_of(one.generate(prompt(1000, seed=3)))
            assert eventually(lambda: store.blocks() == 7), store.blocks()
            return answer, one.metric("vllm:external_prefix_cache_hits_total")
        finally:
            one.kill()
            cache.kill()

    try:
        first, second = answered("first"), answered("second")
    finally:
        store.kill()
    assert first[0] == second[0]
    assert (first[1], second[1]) == (0, 896)
