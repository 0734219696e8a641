"""vLLM on CPUs prefills, transformers decodes: over a store server, with a real engine.

Needs vLLM, and the transformers that it brings; `make test-vllm` installs them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from packages.vllm.tests.support.models import make_model
from packages.vllm.tests.support.pairs import running
from packages.vllm.tests.support.serving import NEEDS_VLLM, engine, prompt, tokens_of
from packages.vllm.tests.support.store_server import StoreServer
from tests.support.waiting import eventually

pytestmark = [NEEDS_VLLM]

torch = pytest.importorskip("torch", reason="torch: `make test-vllm` installs it")
transformers = pytest.importorskip(
    "transformers", reason="transformers: `make test-vllm` installs it"
)

from kvwire_engines.sources import PACKINGS  # noqa: E402
from kvwire_engines.transformers import TransformersCaches  # noqa: E402
from kvwire_store import BlockStore  # noqa: E402
from kvwire_store.weights import weights_name  # noqa: E402

# It would leave a thread behind.
transformers.utils.logging.disable_progress_bar()

BLOCK_TOKENS: Final = 128
ANSWER_TOKENS: Final = 32


@pytest.mark.parametrize(
    ("kernel", "dtype", "block_tokens", "width"),
    [
        ("vec", "float32", 32, 64),
        ("vec", "bfloat16", 128, 64),
        ("vec", "float16", 64, 32),
        ("vec16", "float32", 16, 48),
        ("amx", "bfloat16", 32, 64),
        ("amx", "bfloat16", 64, 128),
    ],
)
def test_a_packing_is_that_of_the_kernel(
    kernel: str, dtype: str, block_tokens: int, width: int
) -> None:
    from vllm import _C, _custom_ops

    assert _C
    heads, blocks = 2, 3
    size = (blocks * block_tokens, heads, width)
    keys, values = torch.randn(2, *size).to(getattr(torch, dtype))
    cache = torch.zeros(blocks, heads, 2 * block_tokens, width, dtype=keys.dtype)
    slots = torch.arange(blocks * block_tokens)
    _custom_ops.cpu_attn_reshape_and_cache(
        keys, values, *cache.chunk(2, dim=2), slots, kernel
    )
    packed = cache.reshape(blocks, heads, 2, -1).float().numpy()
    for part, expected in enumerate((keys, values)):
        unpack = PACKINGS[f"cpu_attn {kernel}"][part]
        found = torch.from_numpy(unpack(packed[:, :, part], width).copy())
        wanted = expected.view(blocks, block_tokens, heads, width).transpose(1, 2)
        assert torch.equal(found, wanted.float())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    made = StoreServer(tmp_path)
    yield made
    made.kill()


def test_vllm_prefills_and_transformers_decodes(
    server: StoreServer, tmp_path: Path
) -> None:
    """All full blocks of a prompt come from vLLM, and the answers are vLLM's."""
    folder = make_model("gqa", tmp_path)
    tiers = ["memory:16MiB", f"kvwire://{server.address}"]
    connector = {
        "kv_connector": "KvwireStoreConnector",
        "kv_connector_module_path": "kvwire_vllm.store.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": tiers, "portable": True},
    }
    one = engine(folder, tmp_path, "vllm", 0, {"require": ["tcp"]}, beside=[connector])
    prompts = [prompt(tokens, seed=1) for tokens in (40, 129, 300, 1000)]
    full = sum(len(ids) // BLOCK_TOKENS for ids in prompts)
    with running(one):
        answers = [tokens_of(one.generate(ids, ANSWER_TOKENS)) for ids in prompts]
        assert eventually(lambda: server.blocks() >= full)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    async def decoded() -> list[tuple[int, list[int]]]:
        found = []
        async with BlockStore.open(tiers) as store:
            weights = weights_name(str(folder))
            kept = TransformersCaches(store, model, weights=weights, others=["vllm"])
            for ids in prompts:
                cache = transformers.DynamicCache(config=model.config)
                known = await kept.get(ids, cache)
                found.append((known, answered(model, ids[known:], cache)))
        return found

    usable = [(len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for ids in prompts]
    assert asyncio.run(decoded()) == list(zip(usable, answers, strict=True))


@torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is not typed here
def answered(model: Any, fresh: list[int], cache: Any) -> list[int]:
    answer: list[int] = []
    for _ in range(ANSWER_TOKENS):
        logits = model(torch.tensor([fresh]), past_key_values=cache).logits
        fresh = [int(logits[0, -1].argmax())]
        answer += fresh
    return answer
