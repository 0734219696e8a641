"""The axis orders of vLLM's attention backends."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvwire import UsageError
from kvwire_vllm.caches import (
    CacheShape,
    cache_shapes,
    find_layout,
    layer_caches,
)
from packages.vllm.tests.support.fakes import vllm_configs

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
        (),
        (9, 2, 2, 8, 128),  # blocks of 16 tokens, split into two of 8
        (9, 2, 16, 136),  # scales beside keys and values
        (9, 4, 16, 36),  # nvfp4
    ],
)
def test_an_order_that_is_not_known(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="fits no known axis order"):
        find_layout(sizes, SHAPE)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_layers_are_in_the_order_of_their_numbers(dtype: str) -> None:
    """A cache of fp8 is one of bytes, as vLLM allocates it; scales are the model's."""
    tensors = {
        f"model.layers.{index}.attn": np.zeros((3, 2, 16, 128), dtype)
        for index in (10, 2, 9, 0)
    }
    found = layer_caches(tensors, [SHAPE])
    assert [name.split(".")[2] for name in found.layers] == ["0", "2", "9", "10"]
    assert list(found.layers.values()) == [("kv", row) for row in range(4)]
    spec = found.cache.spec
    assert (spec.layers, spec.shard, spec.total_kv_heads) == (4, (0, 4), 8)
    assert spec.dtype == dtype


def test_a_layer_that_reads_another_ones_cache_is_not_sent_twice() -> None:
    own = np.zeros((3, 2, 16, 128), np.float32)
    found = layer_caches({"layers.0": own, "layers.1": own}, [SHAPE])
    assert dict(found.layers) == {"layers.0": ("kv", 0)}


def test_states_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"'layers.0' has 2 state tensors"):
        layer_caches({"layers.0": [np.zeros(3), np.zeros(3)]}, [SHAPE])
    with pytest.raises(UsageError, match="nothing to transfer"):
        layer_caches({}, [SHAPE])


def spec(kind: str = "AttentionSpec", **fields: Any) -> Any:
    usual = {"num_kv_heads": 2, "head_size": 64, "block_size": 16}
    return type(kind, (), usual | fields)()


def windowed() -> Any:
    return spec("SlidingWindowSpec", sliding_window=100)


def state(speculative: int = 0) -> Any:
    shapes, dtypes = ((3, 8), (4, 5)), (np.dtype("f4"), np.dtype("f2"))
    more = {"block_size": 1024, "num_speculative_blocks": speculative}
    return spec("MambaSpec", shapes=shapes, dtypes=dtypes, **more)


config = partial(vllm_configs, tensor_parallel_size=4)


def test_what_vllm_says_about_its_caches() -> None:
    assert cache_shapes(*config(spec())) == (SHAPE,)
    latent = spec("MLAAttentionSpec", num_kv_heads=1, head_size=576)
    found = cache_shapes(*config(latent, tensor_parallel_size=1))
    assert found == (LATENT,)


def test_a_pipeline_stage_has_the_layers_that_vllm_gives_it() -> None:
    said = config(spec(), layers=(6, 11), pipeline_parallel_size=2, rank=6)
    (shape,) = cache_shapes(*said)
    assert (shape.stage, shape.first_layer, shape.model_layers) == ((1, 2), 6, 11)
    assert replace(shape, rank=2).index == 6
    tensors = {f"layers.{at}": np.zeros((3, 2, 16, 128)) for at in range(6, 10)}
    with pytest.raises(UsageError, match="5 layers and 4 KV caches"):
        layer_caches(tensors, [shape])


def test_groups_of_several_kinds() -> None:
    kept = spec("FullAttentionSpec", sliding_window=100)
    found = cache_shapes(*config(kept, windowed(), windowed(), state()))
    full, *windows, last = found
    assert [one.name for one in windows] == [
        "1 window of 100, by 16",
        "2 window of 100, by 16",
    ]
    assert (full.name, full.partial, full.table) == ("0 full", False, 0)
    assert [one.layers for one in windows] == [("layers.1",), ("layers.2",)]
    assert last.name == "3 state of 136 bytes on 4 ranks"
    assert (last.table, last.block_tokens, last.total_kv_heads) == (3, 1024, 4)


def test_layers_of_several_kinds_in_one_group() -> None:
    """Such as those of a small model that speculates, or an index beside a latent."""
    said, caches = config(spec())
    (group,) = caches.kv_cache_groups
    group.kv_cache_spec = SimpleNamespace(
        kv_cache_specs={"a": spec(), "b": spec(head_size=32)}
    )
    shapes = cache_shapes(said, caches)
    assert [(one.name, one.layers, one.table) for one in shapes] == [
        ("0 full", ("a",), 0),
        ("1 full", ("b",), 0),
    ]
    group.enable_kv_transfer = False
    assert cache_shapes(said, caches) == ()


@pytest.mark.parametrize(
    ("heads", "draft", "on_a_rank", "ranks", "total"),
    [
        (8, None, 8, 1, 8),
        (8, None, 2, 4, 8),
        (2, None, 1, 4, 2),  # two ranks have a copy each
        (8, 2, 2, 1, 2),
        (8, 2, 1, 4, 2),
        (2, 2, 1, 4, 2),
        # Of the model or of its draft model: a rank counts as a head of its own.
        (4, 2, 1, 4, 4),
        (4, 2, 1, 8, 8),
        (8, None, 3, 4, 12),  # some layers have more
    ],
)
def test_how_many_heads_all_ranks_have(
    heads: int, draft: int | None, on_a_rank: int, ranks: int, total: int
) -> None:
    said, caches = config(
        spec(num_kv_heads=on_a_rank), kv_heads=heads, tensor_parallel_size=ranks
    )
    if draft is not None:
        model = SimpleNamespace(get_total_num_kv_heads=lambda: draft)
        said.speculative_config = SimpleNamespace(draft_model_config=model)
    (shape,) = cache_shapes(said, caches)
    assert (shape.kv_heads, shape.total_kv_heads) == (on_a_rank, total)
    assert shape.profile == f"full, {total} x 64"


def test_a_table_whose_layers_read_other_blocks() -> None:
    said, caches = config(spec())
    (group,) = caches.kv_cache_groups
    group.kv_cache_spec = SimpleNamespace(kv_cache_specs={"a": spec(), "b": windowed()})
    with pytest.raises(UsageError, match=r"table 0 .*\(full; window of 100, by 16\)"):
        cache_shapes(said, caches)


def test_decode_reads_no_other_blocks() -> None:
    """Blocks of 16 tokens; test_connector.py has what vLLM keeps of them."""
    window = replace(SHAPE, window=100)
    chunk = replace(SHAPE, chunk=64)
    last = replace(SHAPE, state=True)
    for tokens in range(1, 300):
        blocks = -(-tokens // 16)
        read = {position // 16 for position in range(max(0, tokens - 99), tokens)}
        assert set(window.needed(tokens)) == read, tokens
        read = {position // 16 for position in range(tokens // 64 * 64, tokens)}
        assert set(chunk.needed(tokens)) == read, tokens
        assert list(last.needed(tokens)) == [blocks - 1]
        assert SHAPE.needed(tokens) == range(blocks)
        assert last.listed_tokens(tokens) == 1
        for shape in (window, chunk, SHAPE):
            listed = shape.listed_tokens(tokens)
            assert -(-listed // 16) == len(shape.needed(tokens)), tokens


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (config(object()), "kind object has no num_kv_heads"),
        (
            config(spec("CrossAttentionSpec")),
            "CrossAttentionSpec: it holds an",
        ),
        (config(state(2)), "speculative decoding with recurrent"),
        (config(spec(head_size_v=32)), "keys of 64 elements and values of 32"),
        (
            config(spec(), state(), pipeline_parallel_size=2, rank=4),
            "^pipeline_parallel_size=2 with full; state of 136 bytes on 4 ranks: ",
        ),
        (
            config(spec(), pipeline_parallel_size=2, rank=4),
            "stage 1 of 2 has layers 5 to 10, but the other engine expects 6 to",
        ),
        (config(spec(), dtype="fp8_per_token_head"), "it stores scales beside"),
        (config(spec(), scales=True), "^calculate_kv_scales: each engine"),
        (
            config(spec(), decode_context_parallel_size=2),
            "^decode_context_parallel_size=2",
        ),
        (
            config(spec(), prefill_context_parallel_size=4),
            "^prefill_context_parallel_size=4",
        ),
    ],
)
def test_what_is_not_supported_is_refused(said: tuple[Any, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        cache_shapes(*said)
