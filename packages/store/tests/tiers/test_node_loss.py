"""A node of many is killed or stands still: shares of hits, and seconds of stall.

With `-m '' -s` each prints its row of the table in docs/topics/store-performance.md. An
engine asks for the blocks of some prompts and puts what it has missed, over and over.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from kvwire import KVSpec
from kvwire_store import BlockStore
from kvwire_store.tiers.sharded import ShardedTier
from packages.store.tests.server_child import serving
from tests.support import inside
from tests.support.caches import Filled, chain
from tests.support.pairs import until
from tests.support.servers import redis_cluster

SPEC = KVSpec(layers=8, kv_heads=4, head_dim=32, block_tokens=16, dtype="float16")
"""Of 64 KiB a block."""
BLOCKS, PROMPTS = 64, 8
TIMEOUT_S = 2
Lose: TypeAlias = Callable[[], None]


@asynccontextmanager
async def store_nodes(
    folder: Path, number: signal.Signals
) -> AsyncIterator[tuple[str, Lose]]:
    """Four store servers in a directory, and what takes one of them away."""
    directory = f"file:{folder}?interval_s=0.05"
    arguments = ("--tier", "memory:64MiB", "--directory", directory)
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(serving(*arguments, "--label", f"node={n}"))
            for n in range(4)
        ]
        where = f"kvwire://role=store?directory={directory}&timeout={TIMEOUT_S}"
        yield where, lambda: nodes[1].signal(number)


@asynccontextmanager
async def redis_nodes(
    folder: Path, number: signal.Signals
) -> AsyncIterator[tuple[str, Lose]]:
    """Three masters and three replicas, and what takes a master away."""
    pytest.importorskip("redis", reason="redis is not installed: pip install redis")
    with redis_cluster() as servers:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        where = f"redis://{hosts}?timeout={TIMEOUT_S}"
        yield where, lambda: servers[1].signal(number)


@pytest.fixture(scope="module", params=[store_nodes, redis_nodes])
def nodes(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_node_is_lost(
    tmp_path: Path, nodes: Any, number: signal.Signals
) -> None:
    source, target = Filled(BLOCKS, SPEC, seed=1), Filled(BLOCKS, SPEC)
    blocks = list(range(BLOCKS))
    prompts = [chain(BLOCKS, f"{number}") for number in range(PROMPTS)]
    wrong = 0

    async def used(store: BlockStore, hashes: list[bytes]) -> tuple[float, float]:
        """Get a prompt and put what it lacks; return the share of hits, and seconds."""
        nonlocal wrong
        await inside.tiers(store).memory.empty()
        begin = time.perf_counter()
        outcome = await store.get(hashes, target.cache, blocks)
        here = outcome.landed.ids().tolist()
        lacking = sorted(set(blocks) - set(here))
        if lacking:
            await store.put([hashes[at] for at in lacking], source.cache, lacking)
        seconds = time.perf_counter() - begin
        wrong += not np.array_equal(source.tokens(here), target.tokens(here))
        return len(here) / BLOCKS, seconds

    async def round_of(store: BlockStore) -> tuple[float, float]:
        shares, times = zip(*[await used(store, one) for one in prompts], strict=True)
        return sum(shares) / PROMPTS, max(times)

    async with (
        nodes(tmp_path, number) as (where, lose),
        BlockStore.open([where]) as store,
    ):
        (tier,) = inside.tiers(store).below
        if isinstance(tier, ShardedTier):
            await until(lambda: len(tier.asked()) == 4)
        for one in prompts:
            assert (await store.put(one, source.cache, blocks)).complete
        before, usual_s = await round_of(store)
        lose()
        begin = time.perf_counter()
        rounds: list[tuple[float, float]] = []
        while not rounds or rounds[-1][0] < 1:
            rounds.append(await round_of(store))
        healed_s = time.perf_counter() - begin
        after, _ = await round_of(store)
    during, stall_s = min(one for one, _ in rounds), max(one for _, one in rounds)
    shares = f"{before:.0%} | {during:.0%} | {after:.0%}"
    times = f"{usual_s:.2f} | {stall_s:.2f} | {healed_s:.1f}"
    print(f"\n| {nodes.__name__} {number.name} | {shares} | {times} | {wrong} |")
    assert (before, after, wrong) == (1, 1, 0)
    assert during > 0.2  # of four or three nodes one is lost
    assert tier.name == where
