"""The axis orders of vLLM's attention backends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvwire import UsageError
from kvwire.integrations.vllm.caches import (
    CacheShape,
    cache_shapes,
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
    found = layer_caches(tensors, [SHAPE])
    assert [name.split(".")[2] for name in found.layers] == ["0", "2", "9", "10"]
    assert list(found.layers.values()) == [("kv", row) for row in range(4)]
    spec = found.cache.spec
    assert (spec.layers, spec.shard, spec.total_kv_heads) == (4, (0, 4), 8)


def test_a_layer_that_reads_another_ones_cache_is_not_sent_twice() -> None:
    own = np.zeros((3, 2, 16, 128), np.float32)
    found = layer_caches({"layers.0": own, "layers.1": own}, [SHAPE])
    assert dict(found.layers) == {"layers.0": ("kv", 0)}


def test_states_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"'layers.0' has 2 state tensors"):
        layer_caches({"layers.0": [np.zeros(3), np.zeros(3)]}, [SHAPE])
    with pytest.raises(UsageError, match="nothing to transfer"):
        layer_caches({}, [SHAPE])


def test_a_cache_of_fp8_is_one_of_bytes() -> None:
    """As vLLM allocates it; the scales are the model's."""
    found = layer_caches({"layers.0": np.zeros((3, 2, 16, 128), np.uint8)}, [SHAPE])
    assert found.cache.spec.dtype == "uint8"


@dataclass
class AttentionSpec:
    """What vLLM says of the cache of one group."""

    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16


@dataclass
class SlidingWindowSpec(AttentionSpec):
    """Of layers with a window."""

    sliding_window: int = 100


@dataclass
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Of layers that attend to chunks."""

    attention_chunk_size: int = 64


class CrossAttentionSpec(AttentionSpec):
    """Of layers that attend to an encoder."""


@dataclass
class FullAttentionSpec(AttentionSpec):
    """Of layers that see everything, or whose blocks are all kept."""

    sliding_window: int | None = 100


@dataclass
class MambaSpec:
    """Of layers with a state."""

    block_size: int = 1024
    shapes: tuple[tuple[int, ...], ...] = ((3, 8), (4, 5))
    dtypes: tuple[Any, ...] = (np.dtype("f4"), np.dtype("f2"))
    num_speculative_blocks: int = 0


class OtherSpec:
    """Of nothing that is known."""


def config(
    *groups: object,
    mla: bool = False,
    dtype: str = "auto",
    scales: bool = False,
    layers: tuple[int, int] = (5, 11),
    **parallel: int,
) -> tuple[Any, Any]:
    """vLLM's two configs, as far as they are looked at; 11 layers."""
    sizes = {"pipeline_parallel_size": 1, "tensor_parallel_size": 4, **parallel}
    model = SimpleNamespace(
        use_mla=mla,
        get_total_num_kv_heads=lambda: 8,
        get_total_num_hidden_layers=lambda: 11,
        get_layers_start_end_indices=lambda _: layers,
    )
    return (
        SimpleNamespace(
            model_config=model,
            parallel_config=SimpleNamespace(**sizes),
            cache_config=SimpleNamespace(cache_dtype=dtype, calculate_kv_scales=scales),
        ),
        SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(kv_cache_spec=group, layer_names=[f"layers.{index}"])
                for index, group in enumerate(groups)
            ]
        ),
    )


def test_what_vllm_says_about_its_caches() -> None:
    assert cache_shapes(*config(AttentionSpec())) == (SHAPE,)
    latent = AttentionSpec(num_kv_heads=1, head_size=576)
    found = cache_shapes(*config(latent, mla=True, tensor_parallel_size=1))
    assert found == (LATENT,)


def test_a_pipeline_stage_has_the_layers_that_vllm_gives_it() -> None:
    said = config(AttentionSpec(), layers=(6, 11), pipeline_parallel_size=2, rank=6)
    (shape,) = cache_shapes(*said)
    assert (shape.stage, shape.first_layer, shape.model_layers) == ((1, 2), 6, 11)
    assert replace(shape, rank=2).index == 6
    tensors = {f"layers.{at}": np.zeros((3, 2, 16, 128)) for at in range(6, 10)}
    with pytest.raises(UsageError, match="5 layers and 4 KV caches"):
        layer_caches(tensors, [shape])


def test_groups_of_several_kinds() -> None:
    specs = (FullAttentionSpec(), SlidingWindowSpec(), SlidingWindowSpec(), MambaSpec())
    full, *windows, state = cache_shapes(*config(*specs))
    assert [one.name for one in windows] == [
        "1 window of 100, by 16",
        "2 window of 100, by 16",
    ]
    assert (full.name, full.partial, full.table) == ("0 full", False, 0)
    assert [one.layers for one in windows] == [("layers.1",), ("layers.2",)]
    assert state.name == "3 state of 136 bytes on 4 ranks"
    assert (state.table, state.block_tokens, state.total_kv_heads) == (3, 1024, 4)


def test_layers_of_several_kinds_in_one_group() -> None:
    """Such as those of a small model that speculates, or an index beside a latent."""
    said, caches = config(AttentionSpec())
    (group,) = caches.kv_cache_groups
    group.kv_cache_spec = SimpleNamespace(
        kv_cache_specs={"a": AttentionSpec(), "b": AttentionSpec(head_size=32)}
    )
    shapes = cache_shapes(said, caches)
    assert [(one.name, one.layers, one.table) for one in shapes] == [
        ("0 full", ("a",), 0),
        ("1 full", ("b",), 0),
    ]
    group.enable_kv_transfer = False
    assert cache_shapes(said, caches) == ()


def test_decode_reads_no_other_blocks() -> None:
    """Blocks of 16 tokens; test_connector.py has what vLLM keeps of them."""
    window = replace(SHAPE, window=100)
    chunk = replace(SHAPE, chunk=64)
    state = replace(SHAPE, state=True)
    for tokens in range(1, 300):
        blocks = -(-tokens // 16)
        read = {position // 16 for position in range(max(0, tokens - 99), tokens)}
        assert set(window.needed(tokens)) == read, tokens
        read = {position // 16 for position in range(tokens // 64 * 64, tokens)}
        assert set(chunk.needed(tokens)) == read, tokens
        assert list(state.needed(tokens)) == [blocks - 1]
        assert SHAPE.needed(tokens) == range(blocks)
        assert state.listed_tokens(tokens) == 1
        for shape in (window, chunk, SHAPE):
            listed = shape.listed_tokens(tokens)
            assert -(-listed // 16) == len(shape.needed(tokens)), tokens


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (config(OtherSpec()), "OtherSpec has no num_kv_heads"),
        (config(CrossAttentionSpec()), "CrossAttentionSpec: it holds an encoder's"),
        (config(MambaSpec(num_speculative_blocks=2)), "states with speculative"),
        (
            config(AttentionSpec(), MambaSpec(), pipeline_parallel_size=2, rank=4),
            "^pipeline_parallel_size=2 with full; state of 136 bytes on 4 ranks: ",
        ),
        (
            config(AttentionSpec(), pipeline_parallel_size=2, rank=4),
            "stage 1 of 2 has layers 5 to 10, and the other engine takes it for 6 to",
        ),
        (config(AttentionSpec(), dtype="fp8_per_token_head"), "its scales lie beside"),
        (config(AttentionSpec(), scales=True), "^calculate_kv_scales: each engine"),
        (
            config(AttentionSpec(), decode_context_parallel_size=2),
            "^decode_context_parallel_size=2",
        ),
        (
            config(AttentionSpec(), prefill_context_parallel_size=4),
            "^prefill_context_parallel_size=4",
        ),
    ],
    ids=[
        "other",
        "encoder",
        "speculative",
        "stages of several kinds",
        "stages that were moved",
        "scales in blocks",
        "scales of its own",
        "decode context",
        "prefill context",
    ],
)
def test_what_is_not_supported_is_refused(said: tuple[Any, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        cache_shapes(*said)
