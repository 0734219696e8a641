"""vLLM prefills, another engine decodes.

A server of vLLM on CPUs computes random prompts, and its connector stores them in a
store server. transformers takes all full blocks of each, computes the rest and decodes
greedily. That is compared with what it makes alone, in float32 with random weights;
and, as a measure, so is what it makes of four equal sequences at once.
docs/howto/engines.md has the figures; run it where `make test-vllm` has installed vLLM,
with gguf.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias

import torch
import transformers

from kvwire_engines.transformers import TransformersCaches
from kvwire_store import BlockStore
from kvwire_store.weights import weights_name
from packages.engines.tests.llamacpp.server import made_from, prompt_of, toy_model
from packages.vllm.tests.support.models import write_word_tokenizer
from packages.vllm.tests.support.pairs import running
from packages.vllm.tests.support.serving import Engine, engine
from packages.vllm.tests.support.store_server import StoreServer
from tests.support.waiting import PATIENCE_S

BLOCK_TOKENS: Final = 128
"""vLLM's blocks on CPUs."""
NEAR_TIE: Final = 1e-3
"""Of logits, whose standard deviation is above 1."""
_ANSWER_TOKENS: Final = 64
_LENGTHS: Final = (10, 2000)
_PAUSE_S: Final = 0.01


Answer: TypeAlias = tuple[list[int], Any]
"""Greedy tokens, and the logits of each: (tokens, vocabulary)."""
Compared: TypeAlias = defaultdict[str, float]
"""Answers beside those of the decoding engine alone: ``tokens`` of all prompts, and
those ``known``, whose KV was there; ``equal`` answers, and ``near ties``, which part
where two tokens have all but the same logit; the largest differences of the two logits
where answers ``parted``, and of any logit until then, ``apart``."""


def shown(found: dict[str, Compared]) -> str:
    """Return the figures as lines."""
    return "\n".join(
        f"  {name}: {one['known']:.0f} of {one['tokens']:.0f} tokens taken; "
        f"{one['equal']:.0f} answers equal, {one['near ties']:.0f} near ties (two "
        f"logits up to {one['parted']:.1e} apart); largest difference of a logit "
        f"{one['apart']:.1e}"
        for name, one in found.items()
    )


def measure(
    prompts: int, seed: int, progress: Callable[[str], object] = lambda _: None
) -> dict[str, Compared]:
    """Let vLLM prefill random prompts and transformers decode them.

    Args:
        prompts: How many.
        seed: Of the prompts.
        progress: Called with the figures until now, now and then.

    Returns:
        Answers with ``vLLM's KV``, and with ``four at once``.

    Raises:
        TimeoutError: A full block of vLLM's was not there to be taken.
    """
    with TemporaryDirectory(prefix="kvwire-") as name:
        place = Path(name)
        folder = made_from(toy_model(place / "toy.gguf"), place / "model")
        write_word_tokenizer(folder)
        with contextlib.ExitStack() as opened:
            server = StoreServer(place)
            opened.callback(server.kill)
            tiers = ["memory:64MiB", f"kvwire://{server.address}"]
            connector = {
                "kv_connector": "KvwireStoreConnector",
                "kv_connector_module_path": "kvwire_vllm.store.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"tiers": tiers, "portable": True},
            }
            prefill = engine(
                folder, place, "vllm", 0, {"require": ["tcp"]}, beside=[connector]
            )
            opened.enter_context(running(prefill))
            draw = random.Random(seed)
            drawn = [
                prompt_of(draw.randrange(2**32), draw.randint(*_LENGTHS))
                for _ in range(prompts)
            ]
            return asyncio.run(_decoded(drawn, folder, tiers, prefill, progress))


async def _decoded(
    prompts: list[list[int]],
    folder: Path,
    tiers: list[str],
    prefill: Engine,
    progress: Callable[[str], object],
) -> dict[str, Compared]:
    found: dict[str, Compared] = {
        "vLLM's KV": defaultdict(float),
        "four at once": defaultdict(float),
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    weights = weights_name(str(folder))
    async with BlockStore.open(tiers) as store:
        kept = TransformersCaches(store, model, weights=weights, others=["vllm"])
        for number, ids in enumerate(prompts, 1):
            await asyncio.to_thread(prefill.generate, ids, 1)
            cache, known = await _taken(kept, ids, model)
            await asyncio.to_thread(_compare, found, model, ids, cache, known)
            if number % 20 == 0:
                progress(f"{number} prompts\n{shown(found)}")
    return found


async def _taken(
    kept: TransformersCaches, ids: list[int], model: Any
) -> tuple[Any, int]:
    """Take a prompt once all of its full blocks are stored."""
    usable = (len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    async with asyncio.timeout(PATIENCE_S):
        while True:
            cache = transformers.DynamicCache(config=model.config)
            known = await kept.get(ids, cache)
            if known == usable:
                return cache, known
            await asyncio.sleep(_PAUSE_S)


def _compare(
    found: dict[str, Compared], model: Any, ids: list[int], cache: Any, known: int
) -> None:
    """Let a model decode a prompt alone, with a cache, and four times at once."""
    alone = _answer(model, ids)
    others = _answer(model, ids[known:], cache), _answer(model, ids, rows=4)
    for one, other in zip(found.values(), others, strict=True):
        one["tokens"] += len(ids)
        _add(one, alone, other)
    found["vLLM's KV"]["known"] += known


def _add(found: Compared, alone: Answer, other: Answer) -> None:
    pairs = enumerate(zip(alone[0], other[0], strict=True))
    parts = next((at for at, (one, two) in pairs if one != two), None)
    seen = slice(None) if parts is None else slice(parts + 1)
    apart = float((alone[1][seen] - other[1][seen]).abs().max())
    found["apart"] = max(found["apart"], apart)
    if parts is None:
        found["equal"] += 1
        return
    both = alone[1][parts, [alone[0][parts], other[0][parts]]]
    gap = float(both[0] - both[1])
    found["parted"] = max(found["parted"], gap)
    found["near ties"] += gap < NEAR_TIE


@torch.inference_mode()  # type: ignore[untyped-decorator]  # torch is not typed here
def _answer(model: Any, fresh: list[int], cache: Any = None, rows: int = 1) -> Answer:
    """Return the greedy answer of the first of so many equal sequences."""
    if cache is None:
        cache = transformers.DynamicCache(config=model.config)
    answer: list[int] = []
    steps = []
    for _ in range(_ANSWER_TOKENS):
        batch = torch.tensor([fresh] * rows)
        logits = model(batch, past_key_values=cache, logits_to_keep=1).logits
        steps.append(logits[0, -1])
        fresh = [int(steps[-1].argmax())]
        answer += fresh
    return answer, torch.stack(steps)
