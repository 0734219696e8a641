"""``python -m packages.certify.tests.bench sessions``: what sessions of llama.cpp cost.

Two llama-servers with a toy model of four layers (f16, a thread each), each with a
folder and a front of its own, share a store server, as on two machines; all are
processes. One computes sessions and the other continues them. Each figure is the
median of its rounds, in turns with what it is compared with. docs/howto/engines.md has
the figures; `make test-llamacpp` installs what they need.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, TypeAlias

import aiohttp

from kvwire.config import Config
from kvwire_engines.llamacpp.sessions import BLOCK_TOKENS
from kvwire_store.server.client import ask_report
from packages.engines.tests.llamacpp.server import (
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


Rig: TypeAlias = tuple[list[LlamaServer], list[LlamaServer], str]
"""Servers, their fronts, and the address of the store server that the fronts share."""


async def measure(tokens: int, rounds: int, requests: int) -> dict[str, float]:
    """Measure all figures; each is a median.

    Args:
        tokens: Tokens of a session.
        rounds: How many sessions.
        requests: How many short requests, and streams.

    Returns:
        Seconds until the first token of a session that is ``computed``, or
        ``continued``; the part of a session's blocks that a second one with the same
        beginning ``stores``; seconds of a short request ``direct`` and through the
        ``front``; and seconds between the tokens of a ``direct stream`` and of a
        ``front stream``.
    """
    found: dict[str, list[float]] = {}

    def note(name: str, figure: float) -> None:
        found.setdefault(name, []).append(figure)

    with TemporaryDirectory(prefix="kvwire-") as folder:
        async with _running(Path(folder)) as rig:
            for seed in range(rounds):
                for name, figure in (await _session(rig, seed, tokens)).items():
                    note(name, figure)
            for _ in range(requests):
                for name, ends in (("direct", rig[0]), ("front", rig[1])):
                    note(name, await _short(ends[0]))
                    note(f"{name} stream", await _between_tokens(ends[0].url))
    return {name: median(figures) for name, figures in found.items()}


@asynccontextmanager
async def _running(folder: Path) -> AsyncIterator[Rig]:
    """Run two servers with their fronts, and the store server that these share."""
    async with AsyncExitStack() as running:
        enter = running.enter_async_context
        command = ("-m", "kvwire", "store", "serve", "--listen", "127.0.0.1:0")
        store = beside(*command, "--tier", "memory:2GiB", kind=Beside, logs=True)
        line = await (await enter(store)).line()
        address = line.partition(" on tcp://")[2].partition(";")[0]
        model = toy_model(folder / "toy.gguf")
        rig: Rig = [], [], address
        for name in ("a", "b"):
            own = folder / name
            own.mkdir()
            server = await enter(llama_server(model, own))
            front = front_beside(server, "memory:16MiB", f"kvwire://{address}")
            rig[0].append(server)
            rig[1].append(await enter(front))
        yield rig


async def _blocks(store: str, least: int = 0) -> int:
    """Wait until a store holds so many blocks; return how many it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            report = await ask_report(store, Config())
            found = report.tiers[0].stats.blocks or 0
            if found >= least:
                return found
            await asyncio.sleep(_PAUSE_S)


async def _session(rig: Rig, seed: int, tokens: int) -> dict[str, float]:
    """Compute a session at one server, and continue it at the other one."""
    (_, there), (here_front, there_front), store = rig
    prompt = prompt_of(seed, tokens)
    full = tokens // BLOCK_TOKENS
    before = await _blocks(store)
    await here_front.complete(prompt, count=1)
    await _blocks(store, before + full)

    longer = [*prompt, *prompt_of(1000 + seed, 8)]
    start = time.perf_counter()
    expected = await there.complete(longer, count=1, cache_prompt=False)
    computed_s = time.perf_counter() - start
    await there.complete([97], count=1, cache_prompt=False)
    start = time.perf_counter()
    found = await there_front.complete(longer, count=1)
    continued_s = time.perf_counter() - start
    assert found["timings"]["cache_n"] == full * BLOCK_TOKENS
    assert found["tokens"] == expected["tokens"]

    shared = tokens - min(_OWN_TOKENS, tokens // 2)
    other = [*prompt[:shared], *prompt_of(2000 + seed, tokens - shared)]
    await here_front.complete(other, count=1)
    await _blocks(store, before + 2 * full - shared // BLOCK_TOKENS)
    await asyncio.sleep(_PAUSE_S)
    more = await _blocks(store) - before - full
    return {
        "computed": computed_s,
        "continued": continued_s,
        "stores": more / full,
    }


async def _short(end: LlamaServer) -> float:
    start = time.perf_counter()
    await end.complete(prompt_of(0, _SHORT_TOKENS), count=1)
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


def shown(found: dict[str, float]) -> str:
    """Return the figures as lines, each beside what it is compared with."""
    ratio = found["continued"] / found["computed"]
    cost_ms = 1e3 * (found["front"] - found["direct"])
    streams = found["front stream"] / found["direct stream"]
    return (
        f"first token of a session: computed in {found['computed']:.3f} s, continued "
        f"at another server in {found['continued']:.3f} s: {ratio:.3f}\n"
        f"a second session with the same beginning stores {found['stores']:.3f} of the "
        "first one's bytes\n"
        f"the front adds {cost_ms:.2f} ms to a request of {1e3 * found['direct']:.2f} "
        f"ms\nthe time between the tokens of a stream through it: {streams:.3f} of "
        f"{1e3 * found['direct stream']:.2f} ms"
    )
