"""A tier on several store servers that a directory names."""

from __future__ import annotations

import signal
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvwire.directory.file import FileDirectory
from kvwire_store import BlockStore, StoreServer
from kvwire_store.keys import Keys, as_keys
from kvwire_store.tiers.sharded import ShardedTier, placed, seed_of
from packages.store.tests.contract import tier_of
from packages.store.tests.server_child import serving
from tests.support import inside
from tests.support.caches import Filled, chain
from tests.support.pairs import until

BLOCKS = 64


def nodes_of(store: BlockStore) -> int:
    """How many servers this side is connected to."""
    return len(tier_of(store, ShardedTier).asked())


async def served(stack: AsyncExitStack, folder: Path, **labels: str) -> BlockStore:
    """A store that is served, and announces itself."""
    store = await stack.enter_async_context(BlockStore.open(["memory:1MiB"]))
    where = f"file:{folder}?interval_s=0.05"
    server = StoreServer(
        store, "127.0.0.1:0", labels={"pool": "a"} | labels, directory=where
    )
    await stack.enter_async_context(server)
    return store


async def test_nodes_come_and_go(tmp_path: Path) -> None:
    source, target = Filled(BLOCKS, seed=1), Filled(BLOCKS)
    hashes, blocks = chain(BLOCKS), list(range(BLOCKS))
    where = f"kvwire://role=store,pool=a?directory=file:{tmp_path}?interval_s=0.05"
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(BlockStore.open([where]))
        assert "no store server" in tier_of(client, ShardedTier).error
        assert await client.match(hashes, source.cache) == 0
        stores = [await served(stack, tmp_path) for _ in range(2)]
        await until(lambda: nodes_of(client) == 2)
        assert (await client.put(hashes, source.cache, blocks)).complete
        held = [len(inside.tiers(store).memory.index) for store in stores]
        assert sum(held) == BLOCKS
        assert min(held) > BLOCKS // 8
        async with BlockStore.open([where]) as other:
            assert await other.match(hashes, target.cache) == BLOCKS
            outcome = await other.get(hashes, target.cache, blocks)
            assert outcome.complete
            assert np.array_equal(source.tokens(blocks), target.tokens(blocks))
            assert other.stats()[where].read_blocks == BLOCKS
            # One that joins has nothing, and takes its share from both.
            async with AsyncExitStack() as third:
                await served(third, tmp_path)
                await until(lambda: nodes_of(other) == 3)
                found = await tier_of(other, ShardedTier).find(_keys(stores))
                assert 0 < (found != 255).sum() < BLOCKS
            await until(lambda: len(tier_of(other, ShardedTier).nodes) == 2)
            assert (await tier_of(other, ShardedTier).find(_keys(stores)) != 255).all()
            await other.delete(hashes, target.cache)
        assert not any(len(inside.tiers(store).memory.index) for store in stores)


async def test_two_nodes_with_one_name_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    where = f"kvwire://role=store?directory=file:{tmp_path}?interval_s=0.05"
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await served(stack, tmp_path, node="a")
        await stack.enter_async_context(BlockStore.open([where]))
        await until(lambda: "have the name a" in caplog.text)
        assert "--label node=NAME" in caplog.text


async def test_verbs_go_to_nodes(tmp_path: Path) -> None:
    cache = Filled(BLOCKS, seed=1).cache
    hashes = chain(BLOCKS)
    where = f"kvwire://role=store,pool=a?directory=file:{tmp_path}?interval_s=0.05"
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(BlockStore.open([where]))
        assert (await client.pin(hashes, cache)).deferred.all()
        stores = [await served(stack, tmp_path) for _ in range(2)]
        await until(lambda: nodes_of(client) == 2)
        assert (await client.put(hashes, cache, range(BLOCKS))).complete
        # A block's own node fetches it, and both nodes are asked to pin.
        for tier in (where, "memory"):
            assert (await client.prefetch(hashes[:8], cache, tier=tier)).complete
        assert (await client.pin(hashes, cache, ttl_s=60)).complete
        kept = [inside.tiers(store).memory.index.kept_bytes.sum() for store in stores]
        assert all(kept)
        assert sum(kept) == BLOCKS * 4096
        assert (await client.unpin(hashes, cache)).complete
        for store in stores:
            assert not inside.tiers(store).memory.index.kept_bytes.any()


def _keys(stores: list[BlockStore]) -> Keys:
    return np.concatenate(
        [inside.tiers(store).memory.index.named().keys for store in stores]
    )


async def test_a_node_that_is_killed_is_misses(tmp_path: Path) -> None:
    """What it had is put to the other one, and no block is ever another one."""
    source, target = Filled(BLOCKS, seed=1), Filled(BLOCKS)
    hashes, blocks = chain(BLOCKS), list(range(BLOCKS))
    where = f"file:{tmp_path}?interval_s=0.05"
    async with AsyncExitStack() as stack:
        arguments = ("--tier", "memory:1MiB", "--directory", where)
        first, _ = [
            await stack.enter_async_context(serving(*arguments, "--label", f"node={n}"))
            for n in "ab"
        ]
        tier = f"kvwire://?directory={where}&timeout=5"
        client = await stack.enter_async_context(BlockStore.open([tier]))
        await until(lambda: nodes_of(client) == 2)
        assert (await client.put(hashes, source.cache, blocks)).complete
        directory = FileDirectory(where)
        (record,) = await directory.members("node=a")
        first.signal(signal.SIGKILL)
        # A lease that does not end here, however long this takes.
        stays = msgspec.structs.replace(record, lease_s=600.0)
        await directory.write(stays.key, stays.encode(), 600)
        await until(lambda: nodes_of(client) == 1)
        assert tier_of(client, ShardedTier).error.startswith("of 2 nodes a: ")
        fresh = await stack.enter_async_context(BlockStore.open([tier]))
        outcome = await fresh.get(hashes, target.cache, blocks)
        here = outcome.landed.ids().tolist()
        assert 0 < len(here) < BLOCKS
        assert np.array_equal(source.tokens(here), target.tokens(here))
        assert all("of 2 nodes a: " in why for why in outcome.missing.reasons)
        # A flush or a delete that leaves out a node is none.
        with pytest.raises(OSError, match="a: "):
            await client.delete(hashes, source.cache)
        assert (await fresh.put(hashes, source.cache, blocks)).complete


async def test_without_a_node_nothing_is_deleted_or_safe(tmp_path: Path) -> None:
    tier = f"kvwire://role=store?directory=file:{tmp_path}"
    async with BlockStore.open([tier]) as store:
        with pytest.raises(OSError, match="no store server has announced itself"):
            await store.delete(chain(1), Filled().cache)
        with pytest.raises(OSError, match="no store server has announced itself"):
            await store.flush()


@pytest.mark.parametrize("nodes", [1, 2, 5, 16])
def test_a_node_that_joins_takes_only_its_share(nodes: int) -> None:
    keys = as_keys(chain(4000))
    seeds = [seed_of(f"tcp://10.0.0.{number}:7500") for number in range(nodes + 1)]
    before, after = placed(keys, seeds[:-1]), placed(keys, seeds)
    moved = before != after
    assert (after[moved] == nodes).all()
    share = 4000 / (nodes + 1)
    counts = np.bincount(after, minlength=nodes + 1)
    # Five standard deviations of a share.
    assert (abs(counts - share) < 5 * share**0.5).all()


def test_the_order_of_nodes_does_not_matter() -> None:
    keys = as_keys([b"", b"a", *chain(100)])
    seeds = np.array([seed_of(name) for name in "abc"], object)
    turned = placed(keys, seeds[::-1].tolist())
    assert (seeds[placed(keys, seeds.tolist())] == seeds[::-1][turned]).all()


async def test_a_node_that_has_just_come_is_dialled_before_it_is_asked(
    tmp_path: Path,
) -> None:
    where = f"kvwire://role=store,pool=a?directory=file:{tmp_path}?interval_s=0.01"
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(BlockStore.open([where]))
        tier = tier_of(client, ShardedTier)
        await served(stack, tmp_path)
        await until(lambda: bool(tier.nodes))
        assert not tier.asked(), "it is known, and not connected"
        await client.flush()
        assert nodes_of(client) == 1
