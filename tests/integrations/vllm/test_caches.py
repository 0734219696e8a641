"""The axis orders of vLLM's attention backends."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvwire import UsageError
from kvwire.integrations.vllm.caches import (
    CacheShape,
    cache_shape,
    find_layout,
    layer_caches,
)

SHAPE = CacheShape(block_tokens=16, kv_heads=2, total_kv_heads=8, head_dim=64, ranks=4)
LATENT = CacheShape(
    block_tokens=16, kv_heads=1, total_kv_heads=1, head_dim=576, mla=True
)


@pytest.mark.parametrize(
    ("shape", "sizes", "layout"),
    [
        (SHAPE, (9, 2, 16, 128), "block head token (kv dim)"),
        (SHAPE, (9, 16, 2, 128), "block token head (kv dim)"),
        (SHAPE, (9, 2, 16, 2, 64), "block kv token head dim"),
        (SHAPE, (2, 9, 16, 2, 64), "kv block token head dim"),
        (SHAPE, (2, 9, 2, 16, 64), "kv block head token dim"),
        (LATENT, (9, 16, 576), "block token dim"),
        (LATENT, (9, 1, 16, 576), "block head token dim"),
    ],
)
def test_the_order_follows_from_the_sizes(
    shape: CacheShape, sizes: tuple[int, ...], layout: str
) -> None:
    assert find_layout(sizes, shape) == layout


@pytest.mark.parametrize(
    "sizes",
    [
        (9, 2, 8, 128),
        (9, 16, 128),
        (9,),
        (9, 2, 2, 8, 128),  # blocks of 16 tokens, split into two of 8
        (9, 2, 16, 136),  # scales beside keys and values
        (9, 4, 16, 36),  # nvfp4
    ],
)
def test_an_order_that_is_not_known(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="no axis order that this version knows"):
        find_layout(sizes, SHAPE)


def test_layers_are_in_the_order_of_their_numbers() -> None:
    tensors = {
        f"model.layers.{index}.attn": np.zeros((3, 2, 16, 128), np.float32)
        for index in (10, 2, 9, 0)
    }
    found = layer_caches(tensors, SHAPE)
    assert [name.split(".")[2] for name in found.layers] == ["0", "2", "9", "10"]
    assert list(found.layers.values()) == [0, 1, 2, 3]
    spec = found.cache.spec
    assert (spec.layers, spec.shard, spec.total_kv_heads) == (4, (0, 4), 8)


def test_a_layer_that_reads_another_ones_cache_is_not_sent_twice() -> None:
    own = np.zeros((3, 2, 16, 128), np.float32)
    found = layer_caches({"layers.0": own, "layers.1": own}, SHAPE)
    assert dict(found.layers) == {"layers.0": 0}


def test_states_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"'layers.0' has 2 state tensors"):
        layer_caches({"layers.0": [np.zeros(3), np.zeros(3)]}, SHAPE)
    with pytest.raises(UsageError, match="nothing to transfer"):
        layer_caches({}, SHAPE)


def test_a_cache_of_fp8_is_one_of_bytes() -> None:
    """As vLLM allocates it; the scales are the model's."""
    found = layer_caches({"layers.0": np.zeros((3, 2, 16, 128), np.uint8)}, SHAPE)
    assert found.cache.spec.dtype == "uint8"


@dataclass
class AttentionSpec:
    """What vLLM says of the cache of one group."""

    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16


class MambaSpec:
    """What it says of another kind."""


def config(*groups: object, mla: bool = False, **parallel: int) -> tuple[Any, Any]:
    """vLLM's two configs, as far as they are looked at."""
    sizes = {"pipeline_parallel_size": 1, "tensor_parallel_size": 4, **parallel}
    model = SimpleNamespace(use_mla=mla, get_total_num_kv_heads=lambda: 8)
    return (
        SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(**sizes)),
        SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=group) for group in groups]
        ),
    )


def test_what_vllm_says_about_its_caches() -> None:
    assert cache_shape(*config(AttentionSpec())) == SHAPE
    latent = AttentionSpec(num_kv_heads=1, head_size=576)
    found = cache_shape(*config(latent, mla=True, tensor_parallel_size=1))
    assert found == LATENT


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (
            config(AttentionSpec(), MambaSpec()),
            r"2 KV cache groups \(AttentionSpec, Mam",
        ),
        (config(MambaSpec()), "MambaSpec has no num_kv_heads"),
        (
            config(AttentionSpec(), pipeline_parallel_size=2),
            "^pipeline_parallel_size=2",
        ),
        (
            config(AttentionSpec(), decode_context_parallel_size=2),
            "^decode_context_parallel_size=2",
        ),
        (
            config(AttentionSpec(), prefill_context_parallel_size=4),
            "^prefill_context_parallel_size=4",
        ),
    ],
    ids=["groups", "mamba", "pipeline", "decode context", "prefill context"],
)
def test_what_is_not_supported_is_refused(said: tuple[Any, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        cache_shape(*said)
