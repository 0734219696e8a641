"""Whatever dies or is damaged, a continued session has the tokens of a computed one.

Needs xllamacpp and gguf, as test_sessions.py does. More rounds, of six requests each:
``pytest --soak 200 --hypothesis-seed 1 packages/engines/tests/llamacpp``.
"""

from __future__ import annotations

import asyncio
import collections
import random
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import aiohttp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvwire_engines.llamacpp import LlamaCppSessions
from kvwire_engines.llamacpp.front import SessionFront
from kvwire_store import BlockStore
from packages.engines.tests.llamacpp.server import (
    LlamaServer,
    llama_server,
    prompt_of,
)
from tests.support.depth import examples

REQUESTS: Final = 6
# Of log-probabilities, whose standard deviation over the vocabulary is about 3.
NEAR_TIE: Final = 0.1
COUNTS: collections.Counter[str] = collections.Counter()


class Round:
    """One seed's servers, store and damage, and the sessions that go on in them."""

    def __init__(self, seed: int, model: Path, folder: Path) -> None:
        self.draw = random.Random(seed)
        self.model = model
        self.folder = folder
        self.tiers = ["memory:4MiB", f"disk:{folder}/kv?size=64MiB"]
        self.form = self.draw.choice(["f16", "q8_0"])
        self.sessions = [prompt_of(self.draw.randrange(3), 96) for _ in range(3)]

    async def run(self) -> int:
        """Send requests through servers and stores that end; return how many."""
        left = REQUESTS
        while left:
            async with AsyncExitStack() as running:
                server = await running.enter_async_context(
                    llama_server(self.model, self.folder, "--kv", self.form)
                )
                store = await running.enter_async_context(BlockStore.open(self.tiers))
                sessions = await running.enter_async_context(
                    LlamaCppSessions(store, server.url, server.folder)
                )
                front = await running.enter_async_context(
                    SessionFront(sessions, "127.0.0.1", 0)
                )
                for _ in range(self.draw.randint(1, left)):
                    left -= 1
                    await self.go_on(server, front.url)
                if self.draw.random() < 0.7:
                    await self.killed(server, front.url)
            if self.draw.random() < 0.4:
                await asyncio.to_thread(self.damage)
        return REQUESTS - left

    async def go_on(self, server: LlamaServer, url: str) -> None:
        """Continue a session, and compare it with what a server computes anew."""
        at = self.draw.randrange(len(self.sessions))
        prompt = [*self.sessions[at], *prompt_of(self.draw.randrange(9), 40)]
        answer = await server.complete(prompt, url=url)
        # Behind the front's back: what the slot holds then is no matter.
        alone = await server.complete(prompt, cache_prompt=False)
        COUNTS["continued" if answer["timings"]["cache_n"] > 1 else "computed"] += 1
        if answer["tokens"] != alone["tokens"]:
            await self.near_tie(server, prompt, answer["tokens"], alone["tokens"])
        self.sessions[at] = prompt + answer["tokens"]

    async def near_tie(
        self, server: LlamaServer, prompt: list[int], one: list[int], other: list[int]
    ) -> None:
        """Check that answers part where two tokens are all but equally likely.

        KV that was computed token by token differs in the last bits from that of one
        pass, also in one server. Wrong KV parts anywhere.
        """
        pairs = enumerate(zip(one, other, strict=False))
        same = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
        asked = [*prompt, *other[:same]]
        found = await server.complete(asked, count=1, n_probs=5, cache_prompt=False)
        likely = found["completion_probabilities"][0]["top_logprobs"]
        gaps = {one["id"]: likely[0]["logprob"] - one["logprob"] for one in likely}
        for token in (one[same], other[same]):
            assert gaps.get(token, 9.0) < NEAR_TIE, (self.form, same, one, other, gaps)
        COUNTS["near ties"] += 1

    async def killed(self, server: LlamaServer, url: str) -> None:
        """Kill the server at some moment of a request, or of the save behind it."""
        body = {"prompt": self.sessions[0], "n_predict": 8}
        async with aiohttp.ClientSession() as session:
            asked = asyncio.ensure_future(session.post(f"{url}/completion", json=body))
            await asyncio.wait([asked], timeout=self.draw.uniform(0, 0.08))
            await server.kill()
            (found,) = await asyncio.gather(asked, return_exceptions=True)
            if isinstance(found, aiohttp.ClientResponse):
                found.close()
        COUNTS["killed"] += 1

    def damage(self) -> None:
        """Flip or cut what the disk holds of blocks."""
        files = [one for one in (self.folder / "kv").rglob("*") if one.is_file()]
        file = max(files, key=lambda one: one.stat().st_blocks)
        raw = bytearray(file.read_bytes())
        for _ in range(self.draw.randrange(1, 30)):
            raw[self.draw.randrange(len(raw))] ^= 1 << self.draw.randrange(8)
        if self.draw.random() < 0.3:
            del raw[self.draw.randrange(len(raw)) :]
        file.write_bytes(raw)
        COUNTS["damaged"] += 1


@settings(max_examples=examples(20), phases=[Phase.generate], deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_continued_session_is_as_a_computed_one(seed: int, model: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert asyncio.run(Round(seed, model, Path(folder)).run()) == REQUESTS
    print(dict(COUNTS))
