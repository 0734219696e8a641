"""Hugging Face models on paged blocks: the logits and tokens of their own cache.

Needs torch and transformers, which `make test` does not bring; `make test-torch` does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

_WHY = "not installed here; `make test-torch` installs torch and transformers"
torch = pytest.importorskip("torch", reason=f"torch: {_WHY}")
transformers = pytest.importorskip("transformers", reason=f"transformers: {_WHY}")

from kvwire import (  # noqa: E402
    Outcome,
    PagedCache,
    PrefillRequest,
    plan_prefill,
)
from kvwire.errors import BackendUnavailable, UsageError  # noqa: E402
from kvwire.kv.blocks import MissingBlocks  # noqa: E402
from kvwire.kv.hashing import HashScheme  # noqa: E402
from kvwire.kv.outcome import nothing_landed  # noqa: E402
from kvwire_engines.transformers import (  # noqa: E402
    PagedSequence,
    TensorPool,
    check_version,
    kv_spec,
)
from kvwire_store import BlockStore  # noqa: E402

BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def model() -> Any:
    """A Llama with random weights and grouped queries."""
    torch.manual_seed(7)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def pool(model: Any) -> TensorPool:
    """Sixteen blocks for that model."""
    spec = kv_spec(model.config, block_tokens=BLOCK_TOKENS, dtype=model.dtype)
    return TensorPool(spec, num_blocks=16)


def prompt(tokens: int) -> Any:
    return torch.arange(tokens).mul(37).remainder(96).unsqueeze(0)


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not typed here
def logits(model: Any, ids: Any, cache: Any) -> Any:
    return model(ids, cache=cache).logits


def test_the_spec_is_that_of_the_model(pool: TensorPool) -> None:
    spec = pool.spec
    assert (spec.layers, spec.kv_heads, spec.head_dim) == (3, 2, 16)
    assert (spec.block_tokens, spec.dtype) == (BLOCK_TOKENS, "float32")
    assert pool.cache.num_blocks == 16


@pytest.mark.parametrize("chunk", [1, 16, 23, 53])
def test_logits_are_those_of_the_stock_cache_whatever_the_chunks(
    model: Any, pool: TensorPool, chunk: int
) -> None:
    ids = prompt(53)
    sequence = PagedSequence(pool, [9, 2, 14, 0])
    parts = [logits(model, part, sequence) for part in ids.split(chunk, dim=1)]
    whole = logits(model, ids, transformers.DynamicCache())
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    assert sequence.get_seq_length() == 53


@pytest.mark.parametrize("usable", [0, 16, 38, 39])
def test_generate_prefills_what_is_not_usable(
    model: Any, pool: TensorPool, usable: int
) -> None:
    """Where only a prefix arrived, whatever lies behind it is computed, not read."""
    ids, blocks = prompt(40), [3, 1, 4, 15]
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(ids, **options)
    logits(model, ids, PagedSequence(pool, blocks))
    whole, inside = divmod(usable, BLOCK_TOKENS)
    for tensor in pool.tensors:
        tensor[blocks[whole], :, inside:] = 1e3
        tensor[blocks[whole + 1 :]] = 1e3
    sequence = PagedSequence(pool, blocks, length=usable)
    paged = model.generate(ids, cache=sequence, **options)
    assert torch.equal(paged, expected)


@pytest.mark.parametrize("lost", [[1], [0], [3], [0, 2], [1, 2], [0, 1, 2, 3], []])
def test_only_the_holes_are_computed(
    model: Any, pool: TensorPool, lost: list[int]
) -> None:
    """KV behind a hole was computed with all before it, and stays as it came."""
    ids, blocks = prompt(60), [3, 1, 4, 15]
    spoilt = [blocks[position] for position in lost]
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options)
    logits(model, ids, PagedSequence(pool, blocks))
    for tensor in pool.tensors:
        tensor[spoilt] = 1e3
    asked = PrefillRequest(
        id="r", num_tokens=60, blocks=blocks, block_tokens=BLOCK_TOKENS
    )
    landed = [block for block in blocks if block not in spoilt]
    plan = plan_prefill([asked], [_outcome(pool, blocks, landed)], holes=True)
    ranges = plan.prefill.get("r", ())
    for start, stop in ranges:
        logits(model, ids[:, start:stop], PagedSequence(pool, blocks, length=start))
    computed = {token for part in ranges for token in range(*part)}
    assert computed == {token for token in range(60) if token // 16 in lost}
    # The last token once more, since what follows it is asked for.
    sequence = PagedSequence(pool, blocks, length=59)
    found = model.generate(ids, cache=sequence, **options)
    assert torch.equal(found, expected)


async def test_a_store_fills_the_blocks_of_a_longer_prompt(model: Any) -> None:
    """What one call computed, the next one reads: its logits stay the same."""
    spec = kv_spec(model.config, block_tokens=BLOCK_TOKENS, dtype=model.dtype)
    blocks, scheme = [3, 8, 1, 6, 2], HashScheme(BLOCK_TOKENS)
    known = []
    async with BlockStore.open(["memory:1MiB"]) as store:
        for length in (10, 40, 75):
            ids, pool = prompt(length), TensorPool(spec, num_blocks=16)
            hashes = scheme.block_hashes(ids[0, :-1].tolist())
            found = await store.get(hashes, pool.cache, blocks[: len(hashes)])
            known.append(found.usable_tokens)
            sequence = PagedSequence(pool, blocks, length=found.usable_tokens)
            fresh = logits(model, ids[:, found.usable_tokens :], sequence)
            stock = logits(model, ids, transformers.DynamicCache())
            torch.testing.assert_close(fresh[0, -1], stock[0, -1])
            await store.put(hashes, pool.cache, blocks[: len(hashes)])
    assert known == [0, 0, 32]


def _outcome(pool: TensorPool, blocks: list[int], landed: list[int]) -> Outcome:
    """What a transfer of 60 tokens says that brought these blocks only."""
    whole = nothing_landed(pool.cache, blocks, "lost", tokens=60)
    (group,) = whole.missing.groups.values()
    lost = ~np.isin(group.ids, landed)
    part = replace(
        group, ids=group.ids[lost], codes=group.codes[lost], lost=group.lost[:, lost]
    )
    return replace(whole, missing=MissingBlocks({"kv": part}, ["lost"]))


def test_attention_reads_the_blocks_and_nothing_else(
    model: Any, pool: TensorPool
) -> None:
    """KV in other blocks of another pool decodes alike; one changed value does not."""
    ids = prompt(33)
    here, there = [5, 11, 2], [0, 1, 2]
    logits(model, ids, PagedSequence(pool, here))
    other = TensorPool(pool.spec, num_blocks=3)
    for source, target in zip(pool.tensors, other.tensors, strict=True):
        target[there] = source[here]
    last = ids[:, 32:]
    expected = logits(model, last, PagedSequence(pool, here, length=32))
    found = logits(model, last, PagedSequence(other, there, length=32))
    assert torch.equal(found, expected)
    other.tensors[1][0, 1, 3, 1, 5] += 1
    wrong = logits(model, last, PagedSequence(other, there, length=32))
    assert not torch.equal(wrong, expected)


def test_the_hook_runs_after_each_write(model: Any, pool: TensorPool) -> None:
    """That layer's blocks hold the tokens then, and no later's."""
    calls: list[tuple[object, ...]] = []

    def on_written(layer: int, start: int, stop: int) -> None:
        touched = [bool(tensor[[8, 3]].abs().sum() > 0) for tensor in pool.tensors]
        calls.append((layer, start, stop, touched))

    sequence = PagedSequence(pool, [8, 3], on_written=on_written)
    logits(model, prompt(20), sequence)
    assert calls == [
        (0, 0, 20, [True, False, False]),
        (1, 0, 20, [True, True, False]),
        (2, 0, 20, [True, True, True]),
    ]


def test_reset_forgets_the_tokens(model: Any, pool: TensorPool) -> None:
    sequence = PagedSequence(pool, [1, 2])
    first = logits(model, prompt(20), sequence)
    sequence.reset()
    assert sequence.get_seq_length() == 0
    assert torch.equal(logits(model, prompt(20), sequence), first)


@pytest.mark.parametrize(
    ("blocks", "length", "ids", "said"),
    [
        ([1, 2], 0, prompt(33), "33 tokens, but its 2 blocks hold 32"),
        ([1], 0, prompt(4).repeat(2, 1), "a batch of 2"),
        ([16], 0, prompt(1), "block"),
        ([-1], 0, prompt(1), "block"),
        ([3, 3], 0, prompt(1), "block"),
        ([1, 2], 33, prompt(1), "length=33"),
    ],
)
def test_what_the_blocks_do_not_hold_is_refused(
    *, model: Any, pool: TensorPool, blocks: list[int], length: int, ids: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        logits(model, ids, PagedSequence(pool, blocks, length=length))


def test_a_model_with_a_window_is_refused() -> None:
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=64)
    with pytest.raises(UsageError, match="sliding_attention"):
        kv_spec(config, block_tokens=16, dtype=torch.float32)


def test_a_pool_in_bfloat16_holds_what_was_written(model: Any) -> None:
    """The spec names bfloat16, and the blocks are bytes that numpy cannot name."""
    spec = kv_spec(model.config, block_tokens=BLOCK_TOKENS, dtype=torch.bfloat16)
    half = TensorPool(spec, num_blocks=2)
    keys = torch.randn(1, 2, 20, 16, dtype=torch.bfloat16)
    sequence = PagedSequence(half, [1, 0])
    read, _ = sequence.update(keys, -keys, 1)
    assert torch.equal(read, keys)
    assert np.prod(read.shape) == 20 * spec.token_bytes // (2 * spec.item_bytes)


def test_a_pool_is_of_no_graph(model: Any, pool: TensorPool) -> None:
    """It would keep the activations of every call made without torch.no_grad."""
    assert model(prompt(20), cache=PagedSequence(pool, [1, 0])).logits.requires_grad
    assert not any(tensor.requires_grad for tensor in pool.tensors)


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not typed here
def test_a_static_cache_in_blocks(model: Any) -> None:
    """Its tokens are cut into blocks in place; other caches are refused by name."""
    static = transformers.StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(UsageError, match="allocated by the first forward pass"):
        PagedCache.of(static, block_tokens=BLOCK_TOKENS)
    model(prompt(40), cache=static)
    cache = PagedCache.of(static, block_tokens=BLOCK_TOKENS)
    assert (cache.num_blocks, cache.spec.kv_heads, cache.spec.head_dim) == (4, 2, 16)
    assert cache.spec.dtype == "float32"
    address = static.layers[1].keys.data_ptr()
    assert int(cache.groups["kv"].bases[1, 0]) == address
    with pytest.raises(UsageError, match="pass block_tokens="):
        PagedCache.of(static)
    with pytest.raises(
        UsageError, match="pass one sequence whose length is a multiple"
    ):
        PagedCache.of(static, block_tokens=BLOCK_TOKENS + 1)


def test_a_version_that_ignores_the_cache_is_refused() -> None:
    """It would compute without the KV, and nothing else would show it."""
    for version in ("5.24.0", "5.30.1.dev0", "6.0.0"):
        check_version(version)
    with pytest.raises(BackendUnavailable, match="ignores the argument `cache`"):
        check_version("5.19.0")
