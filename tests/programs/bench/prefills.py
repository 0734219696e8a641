"""``python -m tests.programs.bench prefills``: vLLM prefills, another engine decodes.

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

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


@dataclass
class Compared:
    """Answers beside those of the decoding engine alone.

    Attributes:
        equal: Answers with the same tokens.
        near_ties: Answers that part where two tokens have all but the same logit.
        parted: The largest difference of the two tokens' logits where answers part.
        apart: The largest difference of a logit, until answers part.
    """

    equal: int = 0
    near_ties: int = 0
    parted: float = 0.0
    apart: float = 0.0

    def add(self, alone: Answer, other: Answer) -> None:
        """Compare one more answer."""
        pairs = enumerate(zip(alone.tokens, other.tokens, strict=True))
        parts = next((at for at, (one, two) in pairs if one != two), None)
        seen = slice(None) if parts is None else slice(parts + 1)
        apart = (alone.logits[seen] - other.logits[seen]).abs().max()
        self.apart = max(self.apart, float(apart))
        if parts is None:
            self.equal += 1
            return
        both = alone.logits[parts, [alone.tokens[parts], other.tokens[parts]]]
        gap = float(both[0] - both[1])
        self.parted = max(self.parted, gap)
        self.near_ties += gap < NEAR_TIE

    def __str__(self) -> str:
        return (
            f"{self.equal} equal, {self.near_ties} near ties (up to {self.parted:.1e} "
            f"apart); largest difference of a logit {self.apart:.1e}"
        )


@dataclass
class Answer:
    """Greedy tokens, and the logits of each: (tokens, vocabulary)."""

    tokens: list[int]
    logits: Any


@dataclass
class Found:
    """What so many prompts gave.

    Attributes:
        prompts: How many.
        tokens: The tokens of all prompts, and of those the ones that vLLM computed.
        taken: With vLLM's KV.
        batched: Four equal sequences at once.
        deviation: The standard deviation of the last logits.
    """

    prompts: int
    tokens: tuple[int, int]
    taken: Compared
    batched: Compared
    deviation: float

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts, {self.tokens[1]} of {self.tokens[0]} tokens "
            f"prefilled by vLLM; logits have a standard deviation of "
            f"{self.deviation:.1f}\n  vLLM's KV: {self.taken}\n"
            f"  four at once: {self.batched}"
        )


def measure(
    prompts: int, seed: int, progress: Callable[[str], object] = lambda _: None
) -> Found:
    """Let vLLM prefill random prompts and transformers decode them.

    Args:
        prompts: How many.
        seed: Of the prompts.
        progress: Called with the figures until now, now and then.

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
) -> Found:
    found = Found(0, (0, 0), Compared(), Compared(), 0.0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    weights = weights_name(str(folder))
    async with BlockStore.open(tiers) as store:
        kept = TransformersCaches(store, model, weights=weights, others=["vllm"])
        for ids in prompts:
            await asyncio.to_thread(prefill.generate, ids, 1)
            cache, known = await _taken(kept, ids, model)
            await asyncio.to_thread(_compare, found, model, ids, cache, known)
            if found.prompts % 20 == 0:
                progress(str(found))
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


def _compare(found: Found, model: Any, ids: list[int], cache: Any, known: int) -> None:
    """Let a model decode a prompt with a cache, alone, and four times at once."""
    alone = _answer(model, ids)
    found.taken.add(alone, _answer(model, ids[known:], cache))
    found.batched.add(alone, _answer(model, ids, rows=4))
    found.prompts += 1
    found.tokens = found.tokens[0] + len(ids), found.tokens[1] + known
    found.deviation = float(alone.logits.std())


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
    return Answer(answer, torch.stack(steps))
