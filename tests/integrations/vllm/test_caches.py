"""The axis orders of vLLM's attention backends."""

from __future__ import annotations

import numpy as np
import pytest

from kvwire import UsageError
from kvwire.integrations.vllm.caches import CacheShape, find_layout, layer_caches

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


@pytest.mark.parametrize("sizes", [(9, 2, 8, 128), (9, 16, 128), (9,)])
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
