"""``python -m tests.programs.bench sessions``: what sessions of llama.cpp cost.

Two llama-servers with a toy model of four layers (f16, a thread each), each with a
folder and a front of its own, share a store server, as on two machines; all are
processes. One computes sessions and the other continues them. Each figure is the
median of its rounds, in turns with what it is compared with. docs/howto/engines.md has
the figures; `make test-llamacpp` installs what they need.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple, Self

import aiohttp

from kvwire.config import Config
from kvwire_engines.llamacpp.sessions import BLOCK_TOKENS
from kvwire_store.server.client import ask_report
from packages.engines.tests.llamacpp.server import (
    Front,
    LlamaServer,
    front_beside,
    llama_server,
    prompt_of,
    toy_model,
)
from tests.support.runs import Beside, beside
from tests.support.waiting import PATIENCE_S

# Of a session's tokens a second one has so many of its own.
_OWN_TOKENS: Final = 200
# Fewer than a block has, so nothing is stored.
_SHORT_TOKENS: Final = 20
_STREAM_TOKENS: Final = 64
# The front stores behind an answer; the next request begins after that.
_PAUSE_S: Final = 0.05


class SessionCosts(NamedTuple):
    """The figures; medians, in seconds but for the share.

    Attributes:
        computed_s: Until the first token of a session that a server computes.
        continued_s: The same where it restores what the other server has computed.
        own_share: Of a session's blocks, how many a second session with the same
            beginning adds to the store.
        direct_s: A short request.
        front_s: The same through the front, with nothing stored.
        direct_token_s: Between two tokens of a stream.
        front_token_s: The same through the front.
    """

    computed_s: float
    continued_s: float
    own_share: float
    direct_s: float
    front_s: float
    direct_token_s: float
    front_token_s: float


class Rig:
    """Two servers with their fronts, and the store server that the fronts share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running = AsyncExitStack()
        self._store = ""
        self.servers: list[LlamaServer] = []
        self.fronts: list[Front] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as running:
            command = ("-m", "kvwire", "store", "serve", "--listen", "127.0.0.1:0")
            store = await running.enter_async_context(
                beside(*command, "--tier", "memory:2GiB", kind=Beside, logs=True)
            )
            self._store = (await store.line()).partition(" on tcp://")[2].split(";")[0]
            model = toy_model(self._folder / "toy.gguf")
            for name in ("a", "b"):
                own = self._folder / name
                own.mkdir()
                server = await running.enter_async_context(llama_server(model, own))
                self.servers.append(server)
                front = front_beside(server, "memory:16MiB", f"kvwire://{self._store}")
                self.fronts.append(await running.enter_async_context(front))
            self._running = running.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    async def blocks(self, least: int = 0) -> int:
        """Wait until the store holds so many blocks; return how many it holds."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                report = await ask_report(self._store, Config())
                found = report.tiers[0].stats.blocks
                if found >= least:
                    return found
                await asyncio.sleep(_PAUSE_S)


async def measure(tokens: int, rounds: int, requests: int) -> SessionCosts:
    """Measure all figures.

    Args:
        tokens: Tokens of a session.
        rounds: How many sessions.
        requests: How many short requests, and streams.
    """
    direct, front, direct_token, front_token = [], [], [], []
    with TemporaryDirectory(prefix="kvwire-") as folder:
        async with Rig(Path(folder)) as rig:
            sessions = [await _session(rig, seed, tokens) for seed in range(rounds)]
            server = rig.servers[0]
            url = rig.fronts[0].url
            for _ in range(requests):
                direct.append(await _short(server, server.url))
                front.append(await _short(server, url))
                direct_token.append(await _between_tokens(server.url))
                front_token.append(await _between_tokens(url))
    return SessionCosts(
        *map(median, zip(*sessions, strict=True)),
        *map(median, (direct, front, direct_token, front_token)),
    )


async def _session(rig: Rig, seed: int, tokens: int) -> tuple[float, float, float]:
    """Compute a session at one server, and continue it at the other one."""
    here, there = rig.servers
    prompt = prompt_of(seed, tokens)
    full = tokens // BLOCK_TOKENS
    before = await rig.blocks()
    await here.complete(prompt, url=rig.fronts[0].url, count=1)
    await rig.blocks(before + full)

    longer = [*prompt, *prompt_of(1000 + seed, 8)]
    start = time.perf_counter()
    expected = await there.complete(longer, count=1, cache_prompt=False)
    computed_s = time.perf_counter() - start
    await there.complete([97], count=1, cache_prompt=False)
    start = time.perf_counter()
    found = await there.complete(longer, url=rig.fronts[1].url, count=1)
    continued_s = time.perf_counter() - start
    assert found["timings"]["cache_n"] == full * BLOCK_TOKENS
    assert found["tokens"] == expected["tokens"]

    shared = tokens - min(_OWN_TOKENS, tokens // 2)
    other = [*prompt[:shared], *prompt_of(2000 + seed, tokens - shared)]
    least = before + 2 * full - shared // BLOCK_TOKENS
    await here.complete(other, url=rig.fronts[0].url, count=1)
    await rig.blocks(least)
    await asyncio.sleep(_PAUSE_S)
    return computed_s, continued_s, (await rig.blocks() - before - full) / full


async def _short(server: LlamaServer, url: str) -> float:
    start = time.perf_counter()
    await server.complete(prompt_of(0, _SHORT_TOKENS), url=url, count=1)
    found = time.perf_counter() - start
    await asyncio.sleep(_PAUSE_S)
    return found


async def _between_tokens(url: str) -> float:
    body = {
        "prompt": prompt_of(0, _SHORT_TOKENS),
        "n_predict": _STREAM_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/completion", json=body) as answer,
    ):
        times = [
            time.perf_counter()
            async for line in answer.content
            if line.startswith(b"data:")
        ]
    await asyncio.sleep(_PAUSE_S)
    return (times[-1] - times[0]) / (len(times) - 1)


def shown(found: SessionCosts) -> str:
    """Return the figures as lines, each beside what it is compared with."""
    ratio = found.continued_s / found.computed_s
    cost_ms = 1e3 * (found.front_s - found.direct_s)
    streams = found.front_token_s / found.direct_token_s
    return (
        f"first token of a session: computed in {found.computed_s:.3f} s, continued at "
        f"another server in {found.continued_s:.3f} s: {ratio:.3f}\n"
        f"a second session with the same beginning stores {found.own_share:.3f} of the "
        "first one's bytes\n"
        f"the front adds {cost_ms:.2f} ms to a request of {1e3 * found.direct_s:.2f} "
        f"ms\nthe time between the tokens of a stream through it: {streams:.3f}"
    )
