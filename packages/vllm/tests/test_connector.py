"""The connector as vLLM sees it: what it makes of vLLM's own configs and caches."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vllm is not installed here; `make test-vllm` installs it",
        allow_module_level=True,
    )

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, while it is imported
    import torch
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.utils import get_pp_indices
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.v1.core import single_type_kv_cache_manager as managers
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        compute_layer_kv_cache_shape_bytes,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from kvwire.config import Config
    from kvwire.errors import UsageError
    from kvwire_vllm.caches import (
        CacheShape,
        cache_shapes,
        find_layout,
        stage_layers,
    )
    from kvwire_vllm.connector import (
        KvwireConnector,
        _answer_limits,
        _with_own_gpu,
    )
    from kvwire_vllm.metrics import REASONS
    from kvwire_vllm.proxy.moving import COMPLETION_TOKENS
    from kvwire_vllm.store.connector import KvwireStoreConnector
    from packages.vllm.tests.support.fakes import ORDERS, Request, vllm_configs
    from tests.support.servers import free_port

configs = partial(vllm_configs, kv_heads=2)


def attention(dtype: torch.dtype = torch.bfloat16) -> Any:
    return FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=64, head_size_v=64, dtype=dtype
    )


@contextmanager
def worker(**parallel: Any) -> Iterator[KvwireConnector]:
    said, caches = configs(attention(), **parallel)
    made = KvwireConnector(said, KVConnectorRole.WORKER, caches)
    yield made
    made.shutdown()


def test_the_second_engine_of_a_group_listens_behind_the_first() -> None:
    port = free_port()
    said, caches = configs(attention(), data_parallel_index=3)
    extra = {"listen": f"127.0.0.1:{port}"}
    said.kv_transfer_config.kv_connector_extra_config = extra
    made = KvwireConnector(said, KVConnectorRole.WORKER, caches)
    assert made.get_handshake_metadata().address == f"tcp://127.0.0.1:{port + 3}"
    made.shutdown()


@pytest.mark.parametrize("kind", [KvwireConnector, KvwireStoreConnector])
def test_what_nothing_was_run_on_is_refused(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, caches = configs(attention())
    made = partial(kind, said, KVConnectorRole.WORKER, caches)
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    with pytest.raises(
        UsageError, match=r"^vLLM 0\.34\.0: kvwire was tested with 0\.30"
    ):
        made()
    extra = said.kv_transfer_config.kv_connector_extra_config
    extra["untested_vllm"] = True
    made().shutdown()
    said.model_config.enable_sleep_mode = True
    with pytest.raises(UsageError, match="without --enable-sleep-mode"):
        made()


@pytest.mark.parametrize(
    ("source", "override", "said"),
    [
        ("auto", {}, {"answer_tokens": 7}),
        ("auto", {"max_new_tokens": 5}, {"answer_tokens": 5, "answer_tokens_max": 5}),
        ("/folder", {}, {"answer_tokens": 7, "answer_tokens_max": 7}),
    ],
)
def test_limits_of_answers_are_those_of_the_server(
    source: str, override: dict[str, int], said: dict[str, int]
) -> None:
    """vLLM's own two lines: `OpenAIServingCompletion`, and `get_max_tokens`."""
    model = configs(attention())[0].model_config
    found = {"max_tokens": override.get("max_new_tokens", 7)}
    model.get_diff_sampling_param = lambda: found
    model.generation_config = source
    model.override_generation_config = override
    assert _answer_limits(model) == said


def test_a_completion_whose_limit_is_null_has_sixteen_tokens() -> None:
    """So a chat without a limit needs one when it continues as a completion."""
    request = CompletionRequest(model="m", prompt=[1], max_tokens=None)
    assert request.max_tokens == COMPLETION_TOKENS == 16


@pytest.mark.parametrize("kind", [KvwireConnector, KvwireStoreConnector])
def test_sleep_is_refused_before_weights_are_loaded(kind: Any) -> None:
    """By the classes alone: MultiConnector asks those of its children as well."""
    said, caches = configs(attention())
    assert kind.supports_sleep_mode(said.kv_transfer_config) is False
    made = kind(said, KVConnectorRole.WORKER, caches)
    try:
        with pytest.raises(UsageError, match="sleeps"):
            made.unregister_kv_caches()
    finally:
        made.shutdown()


def test_every_block_table_is_fetched() -> None:
    said, caches = configs(attention(), attention(torch.float16))
    made = KvwireConnector(said, KVConnectorRole.SCHEDULER, caches)
    assert made.get_loaded_kv_cache_group_ids(None) == (0, 1)


def test_ends_of_a_step_that_failed_elsewhere_come_with_the_next() -> None:
    """As vLLM 0.33 keeps them: each end once, and lost blocks with their request."""
    results = KVOutputAggregator(expected_finished_count=2)
    if not hasattr(results, "ft_defer_kv_connector_outputs"):
        pytest.skip(f"vLLM {vllm.__version__} does not keep outputs of a failed step")
    lost = KVConnectorOutput(finished_recving={"r"}, invalid_block_ids={3})
    results.ft_defer_kv_connector_outputs([lost])
    quiet, late = KVConnectorOutput(), KVConnectorOutput(finished_recving={"r"})
    made = results.aggregate([_ran(quiet), _ran(late)], output_rank=0)
    said = made.kv_connector_output
    assert (said.finished_recving, said.invalid_block_ids) == ({"r"}, {3})


def test_results_name_requests_that_lack_blocks_of_several_groups() -> None:
    with worker() as made:
        results = made.get_transfer_results(())
        assert not results.finished_sending
        assert not results.finished_recving
        assert not results.failed_recving
        made._worker._failed = {"r"}
        assert made.get_transfer_results(()).failed_recving == {"r"}
        assert not made.get_transfer_results(()).failed_recving


def _ran(output: Any) -> Any:
    return ModelRunnerOutput.with_kv_conn_output_only(output)


def test_a_proxy_reads_what_the_connector_counts() -> None:
    """In the form in which vLLM collects it from both sides, and Prometheus gets it."""
    registry = prometheus_client.CollectorRegistry()
    kinds = {
        kind: partial(kind, registry=registry)
        for kind in (
            prometheus_client.Counter,
            prometheus_client.Gauge,
            prometheus_client.Histogram,
        )
    }
    said, _ = configs(attention(), role="kv_consumer")
    names = ["model_name", "engine"]
    values: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    made = KvwireConnector.build_prom_metrics(said, kinds, names, values)

    def unmoved(reason: str) -> float:
        """Prompts of both engines; the counter is there before the first one."""
        name = "vllm:kvwire_unmoved_prompts_total"
        total = 0.0
        for one in ("0", "1"):
            labels = {"model_name": "m", "engine": one, "reason": reason}
            found = registry.get_sample_value(name, labels)
            assert found is not None
            total += found
        return total

    assert [unmoved(reason) for reason in REASONS] == [0] * len(REASONS)
    for engine in values:
        stats = KvwireConnector.build_kv_connector_stats({})
        for observed in (
            {"missing_blocks": [0.0, 3.0], "unreachable": [1.0]},
            {"refused": [1.0], "sent_bytes": [2.0]},
        ):
            more = KvwireConnector.build_kv_connector_stats(observed)
            stats = stats.aggregate(more)
        made.observe(stats.to_dict(), engine)
    assert {reason: unmoved(reason) for reason in REASONS if unmoved(reason)} == {
        "unreachable": 2,
        "refused": 2,
    }
    sent = registry.get_sample_value(
        "vllm:kvwire_sent_bytes_sum", {"model_name": "m", "engine": "0"}
    )
    assert sent == 2


def test_both_sides_give_what_they_have_counted() -> None:
    said, caches = configs(attention())
    scheduler = KvwireConnector(said, KVConnectorRole.SCHEDULER, caches)
    assert scheduler.get_kv_connector_stats() is None
    refused = {"do_remote_prefill": True}
    assert scheduler.request_finished(Request("r", [1, 2], refused), []) == (
        False,
        None,
    )
    assert scheduler.get_kv_connector_stats().data == {"refused": [1.0]}
    assert scheduler.get_kv_connector_stats() is None
    with worker() as made:
        assert made.get_kv_connector_stats() is None


def test_decode_reads_what_vllm_keeps() -> None:
    """By the managers of its own, for each kind that keeps a part."""
    window = SimpleNamespace(sliding_window=100, extra_retained_tokens=0)
    chunk = SimpleNamespace(attention_chunk_size=64)
    ours = CacheShape(block_tokens=16, kv_heads=1, total_kv_heads=1, head_dim=8)
    kinds: list[tuple[CacheShape, Any, Any]] = [
        (replace(ours, window=100), managers.SlidingWindowManager, window),
        (replace(ours, chunk=64), managers.ChunkedLocalAttentionManager, chunk),
        (replace(ours, state=True), managers.MambaManager, None),
        (ours, managers.FullAttentionManager, None),
    ]
    for shape, manager, of in kinds:
        for tokens in range(1, 500):
            skipped = manager.get_num_skipped_tokens(of, tokens)
            needed = shape.needed(tokens)
            assert needed.start == skipped // 16
            assert needed.stop == -(-tokens // 16)


def test_stages_are_cut_as_vllm_cuts_them() -> None:
    for layers in range(1, 40):
        for stages in range(1, min(layers, 8) + 1):
            want = [range(*get_pp_indices(layers, at, stages)) for at in range(stages)]
            assert stage_layers(layers, stages) == want


def test_the_orders_of_the_tests_are_those_of_vllm() -> None:
    assert {layout.name: layout.value for layout in KVCacheLayout} == ORDERS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_the_axes_of_vllm_are_known(dtype: torch.dtype) -> None:
    spec = attention(dtype)
    *sizes, nbytes = compute_layer_kv_cache_shape_bytes(spec, 9)
    sizes.append(nbytes // dtype.itemsize)
    assert find_layout(sizes, *cache_shapes(*configs(spec))) == (
        "block head token (kv dim)"
    )


def test_the_axes_of_mla_are_known() -> None:
    spec = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16
    )
    *sizes, nbytes = compute_layer_kv_cache_shape_bytes(spec, 9)
    sizes.append(nbytes // 2)
    found = find_layout(sizes, *cache_shapes(*configs(spec, kv_heads=1)))
    assert found == "block head token dim"


def test_halves_of_a_batch_are_not_marked_by_hooks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with worker(use_ubatching=False) as made:
        assert made._worker._settings.stream == "layer"
    assert not any("halves of each batch" in message for message in caplog.messages)
    with (
        caplog.at_level(logging.WARNING, "kvwire"),
        worker(use_ubatching=True) as made,
    ):
        assert made._worker._settings.stream == "chunk"
    assert any("halves of each batch" in message for message in caplog.messages)


def test_full_cuda_graphs_are_possible_where_no_hook_is_needed() -> None:
    assert KvwireConnector.requires_piecewise_for_cudagraph({})
    assert not KvwireConnector.requires_piecewise_for_cudagraph({"stream": "chunk"})


@pytest.mark.parametrize(
    ("extra", "device"),
    [
        ({"prefer": ["nccl"]}, "3"),
        ({"require": ["nccl"], "backends": {"nccl": {"device": "1"}}}, "1"),
        ({}, None),
    ],
)
def test_each_rank_has_its_own_gpu_for_nccl(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], device: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    found = _with_own_gpu(Config.load(**extra))
    assert found.backends.get("nccl", {}).get("device") == device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _with_own_gpu(Config.load(**extra)) == Config.load(**extra)
