"""Blocks that are prefetched, pinned and unpinned."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kvwire import UsageError
from kvwire_store import BlockState, BlockStore, Placement, StoreServer
from kvwire_store.address import TierAddress
from kvwire_store.keys import Keys, as_keys
from kvwire_store.namespace import Namespace
from kvwire_store.placement import Placing, Verb, VerbKind, all_placed
from kvwire_store.tiers.base import Batch, BlockResult, BlockResults
from kvwire_store.tiers.disk import DiskTier
from packages.store.tests.contract import in_memory, put_before
from packages.store.tests.fakes import FakeTier
from packages.store.tests.files import store_on
from packages.store.tests.server.rig import where
from tests.support import inside
from tests.support.caches import Filled, chain
from tests.support.pairs import turns, until

A, B = chain(4, "a"), chain(4, "b")
CACHE = Filled(seed=1).cache
MEMORY = "memory:256KiB"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[BlockStore]:
    """A store of memory and a disk, of which only the disk has B."""
    tiers = [MEMORY, f"disk:{tmp_path}?size=1MiB"]
    async with BlockStore.open(tiers, tenants=["t"]) as store:
        assert (await store.put(B, CACHE, range(4))).complete
    async with BlockStore.open(tiers, tenants=["t"]) as store:
        assert (await store.put(A, CACHE, range(4, 8))).complete
        yield store


async def test_what_is_prefetched_is_in_memory(store: BlockStore) -> None:
    assert in_memory(store, A + B) == [True] * 4 + [False] * 4
    before = store.counters.gets, store.counters.hit_blocks
    told = await store.prefetch(A[:1] + B[:2] + chain(1, "c") + A[:1], CACHE)
    assert in_memory(store, A + B) == [True] * 6 + [False] * 2
    assert (store.counters.gets, store.counters.hit_blocks) == before
    assert told.counts == {"done": 4, "missing": 1}
    assert (told.prefix, told.complete, len(told)) == (3, False, 5)
    assert told.reason(3) == "it is not in the store"
    assert told.reason(0) == ""
    assert repr(told) == "<Placement of 5 blocks: 4 done, 1 missing>"
    target = Filled()
    assert (await store.get(B, target.cache, range(4))).complete
    assert (target.tokens([*range(4)]) == Filled(seed=1).tokens([*range(4)])).all()
    # Without a cache, and for a tenant that has none.
    assert (await store.prefetch(B)).complete
    assert (await store.prefetch(A, tenant="t")).missing.all()
    with pytest.raises(UsageError, match="the tenants are t"):
        await store.prefetch(A, tenant="u")


async def test_a_tier_below_memory_gets_what_a_lower_one_has(tmp_path: Path) -> None:
    slow = f"disk:{tmp_path / 'slow'}?size=1MiB"
    await put_before(MEMORY, slow, count=4)
    fast = FakeTier("fast:a?b=c")
    disk = await DiskTier.open(TierAddress.parse(slow))
    async with store_on(fast, disk, memory=MEMORY) as store:
        with pytest.raises(UsageError, match="tier='x': the tiers are memory:256KiB,"):
            await store.prefetch(chain(4), CACHE, tier="x")
        fast.refusing = True
        fast.error = "it is full"
        told = await store.prefetch(chain(4), CACHE, tier="fast")
        assert told.deferred.all()
        assert told.reasons == ("fast:a?b=c: it is full",)
        fast.refusing = False
        assert (await store.prefetch(chain(4), CACHE, tier="fast:a")).complete
        assert len(fast.orders) == 4
        for verb in (store.pin, store.unpin):
            # Memory and the disk have pinned them.
            assert (await verb(chain(4), CACHE)).complete


async def test_a_tier_that_cannot_pin_refuses() -> None:
    tier = FakeTier()
    async with store_on(tier) as store:
        await store.put(A, CACHE, range(4))
        await inside.tiers(store).memory.delete(
            as_keys(map(next(iter(inside.tiers(store).namespaces)).__add__, A))
        )
        for verb in (store.pin, store.unpin):
            told = await verb(A, CACHE)
            assert told.refused.all()
            assert told.reasons[0].startswith("fake cannot ")
        # It has no bytes to give, whatever its index has.
        assert (await store.prefetch(A, CACHE)).missing.all()


class SlowTier(FakeTier):
    """Reads zeros, and only once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.reads = 0

    async def _read(self, namespace: object, batch: Batch) -> BlockResults:
        self.reads += 1
        await self.go.wait()
        batch.orders[:] = [self.orders[key] for key in batch.keys.tolist()]
        return np.full(batch.keys.size, BlockResult.LANDED, np.uint8)


async def test_a_prefetch_and_a_get_read_a_block_once() -> None:
    tier = SlowTier()
    async with store_on(tier) as store:
        await store.put(A, CACHE, range(4))
        (digest,) = inside.tiers(store).namespaces
        await inside.tiers(store).memory.delete(as_keys(map(digest.__add__, A)))
        fetching = [asyncio.create_task(store.prefetch(A, CACHE)) for _ in range(2)]
        await until(lambda: tier.reads)
        got = store.get(A, Filled().cache, range(4))
        await turns(10)
        fetching[1].cancel()
        tier.go.set()
        assert (await got).complete
        assert (await fetching[0]).complete
        assert tier.reads == 1
        assert in_memory(store, A) == [True] * 4
        with pytest.raises(asyncio.CancelledError):
            await fetching[1]
        assert inside.tiers(store).memory.index.pinned == 0
        assert inside.tiers(store).moving_bytes.sum() == 0


async def test_a_pin_ends_by_itself(tmp_path: Path) -> None:
    tiers = ["memory:128KiB", f"disk:{tmp_path}?size=128KiB&slab=64KiB"]
    now = [1e9]
    for ahead_s, left in ((50, 4), (100, 0)):
        async with BlockStore.open(tiers) as store:
            tier = inside.tiers(store).below[0]
            assert isinstance(tier, DiskTier)
            for index in (inside.tiers(store).memory.index, tier.index):
                index.now = lambda: now[0]
            await store.put(A, CACHE, range(4))
            assert (await store.pin(A, CACHE, ttl_s=100)).complete
            # A second pin that would end before changes nothing.
            assert (await store.pin(A, CACHE, ttl_s=1)).complete
            now[0] += ahead_s
            for number in range(20):
                await store.put(chain(8, f"{number} {left}"), CACHE, range(8))
            assert await store.match(A, CACHE) == left


async def test_more_than_a_quarter_is_clipped_from_the_head_on() -> None:
    async with BlockStore.open(["memory:64KiB"]) as store:
        await store.put(A + B, CACHE, range(8))
        told = await store.pin(A + B, CACHE)
        assert (told.prefix, told.counts) == (4, {"done": 4, "clipped": 4})
        assert "may pin no more" in told.reason(7)
        assert (await store.pin(B, CACHE)).clipped.all()
        await store.unpin(A, CACHE)
        assert (await store.pin(B, CACHE)).complete


async def test_no_more_is_prefetched_at_once_than_a_tenant_may(tmp_path: Path) -> None:
    tiers = ["memory:64KiB", f"disk:{tmp_path}?size=1MiB"]
    tenants = ["t?memory=16KiB", "u"]
    async with BlockStore.open(tiers, tenants=tenants) as store:
        for tenant in ("t", "u"):
            await store.put(A, CACHE, range(4), tenant=tenant)
    async with BlockStore.open(tiers, tenants=tenants) as store:
        told = await store.prefetch(A, CACHE, tenant="t")
        assert told.counts == {"done": 2, "clipped": 2}
        why = "2 blocks are the most that its tenant may prefetch at once"
        assert told.reason(3) == why
        assert (await store.prefetch(A, CACHE, tenant="u")).complete
        inside.tiers(store).moving_bytes[1] = 4096
        told = await store.prefetch(A[2:], CACHE, tenant="t")
        assert told.counts == {"done": 1, "deferred": 1}


async def test_blocks_of_no_tenant_have_a_bound_too(tmp_path: Path) -> None:
    tiers = [MEMORY, f"disk:{tmp_path}?size=1MiB"]
    bound = "?pinned=8KiB"
    async with BlockStore.open(tiers, tenants=[bound]) as store:
        await store.put(A, CACHE, range(4))
        assert (await store.pin(A, CACHE)).counts == {"done": 2, "clipped": 2}
        await store.unpin(A, CACHE)
    async with BlockStore.open(tiers, tenants=["t", bound]) as store:
        assert (await store.pin(A, CACHE)).counts == {"done": 2, "clipped": 2}
        assert list(store.tenant_stats()) == ["", "t"]
    for wrong in ("?quota=1MiB", "?ttl=5"):
        with pytest.raises(UsageError, match="unknown option"):
            BlockStore.open(tiers, tenants=[wrong])
    with pytest.raises(UsageError, match="a name appears twice"):
        BlockStore.open(tiers, tenants=[bound, bound])


async def test_a_duration_that_is_none_is_refused_by_name(store: BlockStore) -> None:
    for ttl_s in (0, -1, float("nan"), "soon"):
        with pytest.raises(UsageError, match="ttl_s="):
            await store.pin(A, ttl_s=ttl_s)  # type: ignore[arg-type]


def test_reasons_are_those_of_the_blocks_left() -> None:
    placing = Placing(3, BlockState.MISSING, "nowhere")
    placing.rule(np.array([1]), BlockState.DONE)
    placing.rule(np.array([2]), BlockState.REFUSED, "not here")
    placing.rule(np.array([], np.int64), BlockState.DEFERRED, "of none")
    told = placing.end()
    assert told.reasons == ("nowhere", "not here")
    assert [told.reason(at) for at in range(3)] == ["nowhere", "", "not here"]


async def test_what_a_disk_cannot_write_of_pins_is_as_before(tmp_path: Path) -> None:
    """Or blocks whose unpin has failed go, though the disk still has their pins."""
    disk = await DiskTier.open(TierAddress.parse(f"disk:{tmp_path}?size=1MiB"))
    async with store_on(disk, memory=MEMORY) as store:
        await store.put(A, CACHE, range(4))
        assert (await store.pin(A[:2], CACHE, ttl_s=60)).complete
        (namespace,) = inside.tiers(store).namespaces.values()
        keys = as_keys(map(namespace.digest.__add__, A))
        pinned = keys[:2]
        ends = disk.index.ends(disk.index.find(pinned)).tolist()

        def same() -> bool:
            kept = disk.index.kept(keys).tolist()
            now = disk.index.ends(disk.index.find(pinned)).tolist()
            return (kept, now) == ([True, True, False, False], ends)

        for verb in (Verb.pin(3600), Verb.pin(None), Verb(VerbKind.UNPIN)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(disk.rows, "pin", failing)
                told = await disk.apply(verb, namespace, keys)
            assert told.deferred.all()
            assert "pinning failed" in told.reason(0)
            assert same()
        assert (await disk.apply(Verb(VerbKind.UNPIN), namespace, keys)).complete
        assert not disk.index.kept(keys).any()
        assert not disk.rows.pins()[0].size


async def test_an_unpin_ends_pins_beyond_the_bound_too(tmp_path: Path) -> None:
    """Or they are back when the bound is."""
    tiers = [MEMORY, f"disk:{tmp_path}?size=1MiB"]
    async with BlockStore.open(tiers, tenants=["t"]) as store:
        await store.put(A, CACHE, range(4), tenant="t")
        assert (await store.pin(A, CACHE, tenant="t")).complete
    async with BlockStore.open(tiers, tenants=["t?pinned=4KiB"]) as store:
        assert store.tenant_stats()["t"].tiers[tiers[1]].pinned_bytes == 4096
        assert (await store.unpin(A, CACHE, tenant="t")).complete
    async with BlockStore.open(tiers, tenants=["t"]) as store:
        assert store.tenant_stats()["t"].tiers[tiers[1]].pinned_bytes == 0


def failing(*_: object) -> None:
    raise OSError(errno.EIO, "no")


async def test_a_tier_that_is_away_counts_for_pins() -> None:
    """Or an unpin were done, and the server went on with the pin."""
    tier = AwayTier()
    async with store_on(tier, write="back") as store:
        await store.put(A, CACHE, range(4))
        for call in (store.pin(A, CACHE), store.unpin(A, CACHE)):
            told = await call
            assert told.deferred.all()
            assert told.reasons == ("away",)
        # Where blocks are wanted in memory, that is enough.
        assert (await store.prefetch(A, CACHE)).complete


class AwayTier(FakeTier):
    """Cannot be reached."""

    async def apply(self, verb: Verb, namespace: Namespace, keys: Keys) -> Placement:
        return all_placed(keys.size, BlockState.DEFERRED, "away")


async def test_verbs_are_carried_out_at_the_server(tmp_path: Path) -> None:
    tiers = [MEMORY, f"disk:{tmp_path}?size=1MiB"]
    await put_before(*tiers, count=4)
    async with (
        BlockStore.open(tiers) as store,
        StoreServer(store, "127.0.0.1:0") as server,
        BlockStore.open([MEMORY, where(server)]) as client,
    ):
        tier = where(server)
        assert (await client.prefetch(chain(4), CACHE, tier=tier)).complete
        assert in_memory(store, chain(4)) == [True] * 4
        # What the server lacks comes from the client's memory.
        assert (await client.put(A, CACHE, range(4))).complete
        await store.delete(A, CACHE)
        assert (await client.prefetch(A, CACHE, tier=tier)).complete
        assert in_memory(store, A) == [True] * 4
        assert (await client.pin(A, CACHE, ttl_s=100)).complete
        for index in (
            inside.tiers(store).memory.index,
            inside.tiers(store).below[0].index,  # type: ignore[attr-defined]
        ):
            assert index.kept_bytes.sum() == 4 * 4096
        assert (await client.unpin(A, CACHE)).complete
        told = await client.pin(A + chain(1, "c"), CACHE)
        assert told.counts == {"done": 4, "missing": 1}
    async with BlockStore.open([MEMORY, where(server)]) as client:
        told = await client.pin(A, CACHE)
        assert told.deferred.all()
        assert "kvwire://" in told.reasons[0]
