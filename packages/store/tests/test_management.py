"""Blocks that are deleted, prefetched, pinned, and of tenants, in memory and below."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from operator import add
from pathlib import Path

import numpy as np
import pytest

from kvwire import UsageError
from kvwire.kv.blocks import Ids
from kvwire_store import BlockState, BlockStore, Placement, StoreServer
from kvwire_store.address import TierAddress
from kvwire_store.keys import Keys, as_keys
from kvwire_store.namespace import Namespace
from kvwire_store.placement import Placing, Verb, VerbKind, all_placed
from kvwire_store.tenants import Tenants
from kvwire_store.tiers.base import Batch, BlockResult, BlockResults
from kvwire_store.tiers.disk import DiskTier
from kvwire_store.tiers.slabs import GRAIN_BYTES
from packages.store.tests.contract import NAMESPACE, in_memory, put_before
from packages.store.tests.fakes import FakeTier
from packages.store.tests.files import disk, store_on
from packages.store.tests.server.rig import where
from tests.support import inside
from tests.support.caches import STORED as SPEC
from tests.support.caches import Filled, chain
from tests.support.pairs import turns, until

A, B = chain(4, "a"), chain(4, "b")


@pytest.fixture(params=["memory", "disk", "coded"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """A store of one tier that counts, and memory where that is another."""
    disk = f"disk:{tmp_path}/disk?size=1MiB"
    below = {"disk": [disk], "coded": [f"{disk}&codec=zstd-planes"]}
    return ["memory:256KiB", *below.get(request.param, [])]


async def test_what_is_deleted_is_in_no_tier(tiers: list[str]) -> None:
    """Nor after a restart, and what others have stays."""
    cache = Filled(seed=1).cache
    async with BlockStore.open(tiers, tenants=["t"]) as store:
        for tenant in ("", "t"):
            await store.put(A + B, cache, range(8), tenant=tenant)
        await store.delete(A[2:], cache, tenant="t")
        assert await store.match(A, cache, tenant="t") == 2
        here = await store.present(A[::-1], cache, tenant="t", hash_tokens=4)
        assert here == [False, False, True, True]
        assert await store.match(A, cache) == 4
        assert await store.delete_all(tenant="t") == 6, "each once, of two tiers too"
        assert await store.delete_all(tenant="t") == 0
        assert await store.match(B, cache, tenant="t") == 0
        got = await store.get(A, Filled().cache, range(4), tenant="t")
        assert set(got.missing.reasons) == {"it is not in the store"}
        assert (await store.put(A[:1], cache, [0], tenant="t")).complete
    if len(tiers) == 1:
        return
    async with BlockStore.open(tiers, tenants=["t"]) as store:
        assert await store.match(A + B, cache) == 8
        assert await store.match(A, cache, tenant="t") == 1
        assert await store.delete_all(cache) == 8
        assert await store.match(B, cache) == 0
        assert await store.match(A, cache, tenant="t") == 1


async def test_a_delete_waits_for_who_writes_and_deletes_that_too() -> None:
    tier, go = FakeTier(), asyncio.Event()
    tier.before = go.wait
    cache = Filled(seed=1).cache
    store = store_on(tier)
    put = store.put(A, cache, range(4))
    await until(lambda: tier.moving)
    deleting = asyncio.create_task(store.delete(A, cache))
    await asyncio.sleep(0)
    assert not deleting.done()
    go.set()
    await deleting
    await put
    assert await store.match(A, cache) == 0
    await store.close()
    assert not tier.orders


async def test_a_second_delete_waits_for_what_the_first_one_waits_for() -> None:
    """Blocks without a name that are on their way down yet."""
    tier, go = FakeTier(), asyncio.Event()
    tier.before, cache = go.wait, Filled(seed=1).cache
    async with store_on(tier, write="back") as store:
        await store.put(A, cache, range(4))
        flush = asyncio.create_task(store.flush())
        await until(lambda: tier.moving)
        deletes = [
            asyncio.create_task(one)
            for one in (
                store.delete(A + A, cache),
                store.delete(A, cache),
                store.delete_all(cache),
            )
        ]
        await turns(10)
        assert not any(one.done() for one in deletes)
        go.set()
        for one in deletes:
            await one
            assert not tier.orders
        await flush


async def test_what_is_pinned_outlives_what_is_not(tmp_path: Path) -> None:
    tiers = ["memory:128KiB", f"disk:{tmp_path}?size=128KiB&slab=64KiB"]
    cache = Filled(seed=1).cache
    async with BlockStore.open(tiers, tenants=["t"]) as store:
        await store.put(A, cache, range(4), tenant="t")
        assert (await store.pin(A, cache, tenant="t")).prefix == 4
        for number in range(20):
            await store.put(chain(8, f"{number}"), cache, range(8))
        assert await store.match(A, cache, tenant="t") == 4
        # Also where the store is to say for which cache: nobody hears of another's.
        assert (await store.match(A, tenant="t"), await store.match(A)) == (4, 0)
        assert (await store.get(A, Filled().cache, range(4), tenant="t")).complete
        for use in store.tenant_stats()["t"].tiers.values():
            assert use.pinned_bytes == use.used_bytes == 4 * 4096
        # No more than a quarter of a tier.
        some = chain(8, "19") + chain(4, "18")
        assert (await store.pin(some, cache)).prefix < len(some)
        await store.unpin(some, cache)
    # What is pinned on a disk is pinned after a restart, and what is not is not.
    for left in (4, 0):
        async with BlockStore.open(tiers, tenants=["t"]) as store:
            for number in range(20):
                await store.put(chain(8, f"{number} again"), cache, range(8))
            assert await store.match(A, cache, tenant="t") == left
            uses = store.tenant_stats()
            assert uses[""].tiers[tiers[1]].pinned_bytes == 0
            assert uses["t"].tiers[tiers[1]].pinned_bytes == left * 4096
            await store.unpin(A, cache, tenant="t")


async def test_a_delete_goes_on_until_nobody_brings_blocks_back(
    tmp_path: Path,
) -> None:
    """A get that reads while they are deleted does, and a flush writes them again."""
    cache = Filled(seed=1).cache
    deletes, reading, go = 0, asyncio.Event(), asyncio.Event()

    class Beside(DiskTier):
        async def read(self, namespace: Namespace, batch: Batch) -> BlockResults:
            results = await super().read(namespace, batch)
            reading.set()
            await go.wait()
            return results

        async def delete(self, keys: Keys) -> None:
            nonlocal deletes
            deletes += 1
            reading.clear()
            go.clear()
            getting = store.get(A, Filled().cache, range(4))
            if deletes <= 2:
                await reading.wait()
            await super().delete(keys)
            go.set()
            assert (await getting).complete == (deletes <= 2)
            await store.flush()

    async with store_on(await disk(tmp_path, kind=Beside), write="back") as store:
        await store.put(A, cache, range(4))
        await store.flush()
        await store.delete(A, cache)
        assert await store.match(A, cache) == 0
    assert deletes == 3


async def test_two_deletes_at_once_are_both_done(tmp_path: Path) -> None:
    """One erases, and the other has just said what to erase: nothing has failed."""
    tiers, cache = ["memory:64KiB", f"disk:{tmp_path}?size=1MiB"], Filled(seed=1).cache
    async with BlockStore.open(tiers) as store:
        await store.put(A, cache, range(4))
        await asyncio.gather(*(store.delete([one], cache) for one in A))
    async with BlockStore.open(tiers) as store:
        assert await store.match(A, cache) == 0


async def test_what_is_pinned_while_it_makes_room_stays() -> None:
    tier, go, cache = FakeTier(), asyncio.Event(), Filled(seed=1).cache
    hashes = chain(16)
    async with store_on(tier, memory="memory:64KiB", write="back") as store:
        await store.put(hashes, cache, range(16))
        tier.before = go.wait
        put = store.put(B[:1], cache, [0])
        await until(lambda: tier.moving)
        index = inside.tiers(store).memory.index
        going = [h for h in hashes if index._state.pins[_slots(store, [h])].all()]
        assert all([(await store.pin([one], cache)).complete for one in going])
        go.set()
        await put
        assert all(_slots(store, going) >= 0)
        assert index.kept_bytes.sum() == len(going) * GRAIN_BYTES


async def test_what_one_tenant_has_pinned_lets_another_put() -> None:
    """Also where it is all that the one has, and was used less recently."""
    tenants = Tenants(["a?pinned=32KiB", "b"])
    cache = Filled(seed=1).cache
    async with store_on(memory="memory:128KiB", tenants=tenants) as store:
        pinned, hashes = chain(8, "pinned"), chain(32)
        await store.put(pinned, cache, range(8), tenant="a")
        assert (await store.pin(pinned, cache, tenant="a")).prefix == 8
        for first in range(0, 32, 8):
            some = hashes[first : first + 8]
            assert (await store.put(some, cache, range(8), tenant="b")).complete
        assert await store.match(pinned, cache, tenant="a") == 8


def _slots(store: BlockStore, hashes: list[bytes]) -> Ids:
    return inside.tiers(store).memory.index.find(
        as_keys(NAMESPACE.digest + one for one in hashes)
    )


async def test_a_quota_and_an_age_hold_in_each_tier_and_after_a_restart(
    tmp_path: Path,
) -> None:
    tiers = ["memory:256KiB", f"disk:{tmp_path}?size=1MiB"]
    tenants = ["t?memory=16KiB&disk=64KiB&ttl=3600"]
    cache, hashes = Filled(24, seed=1).cache, chain(24)

    def used(store: BlockStore) -> list[int]:
        tiers = store.tenant_stats()["t"].tiers.values()
        return [use.used_bytes for use in tiers]

    async with BlockStore.open(tiers, tenants=tenants) as store:
        await store.put(hashes, cache, range(24))
        done = await store.put(hashes, cache, range(24), tenant="t")
        assert done.complete
        assert used(store) == [16 * 1024, 64 * 1024]
        assert await store.match(hashes, cache) == 24
        target = Filled(24)
        got = await store.get(hashes, target.cache, range(24), tenant="t")
        assert got.nbytes == 16 * 512
        assert used(store) == [16 * 1024, 64 * 1024]
    async with BlockStore.open(tiers, tenants=tenants) as store:
        assert used(store) == [0, 64 * 1024]
        assert await store.match(hashes[:4], cache, tenant="t") == 4
    async with BlockStore.open(tiers, tenants=tenants) as store:
        index = inside.tiers(store).memory.index
        index.now = lambda: time.time() + 3601
        (tier,) = inside.tiers(store).below
        tier.index.now = index.now  # type: ignore[attr-defined]
        assert await store.match(hashes[:4], cache, tenant="t") == 0
        assert await store.match(hashes, cache) == 24


@pytest.mark.parametrize("how", ["evicted", "beyond a quota", "too old"])
async def test_what_has_no_name_any_more_is_deleted_on_the_disk_as_well(
    tmp_path: Path, how: str
) -> None:
    """Its row is there, and nothing was written over it."""
    tiers, cache = ["memory:64KiB", f"disk:{tmp_path}?size=1MiB"], Filled(seed=1).cache
    said = {"evicted": "t?disk=32KiB", "too old": "t?ttl=3600"}.get(how, "t")
    hashes = chain(8)
    async with BlockStore.open(tiers, tenants=[said]) as store:
        assert (await store.put(hashes, cache, range(8), tenant="t")).complete
        if how == "evicted":
            large = Filled(spec=replace(SPEC, head_dim=128), seed=2).cache
            assert (await store.put(A[:2], large, range(2), tenant="t")).complete
        if how == "too old":
            (tier,) = inside.tiers(store).below
            for index in (inside.tiers(store).memory.index, tier.index):  # type: ignore[attr-defined]
                index.now = lambda: time.time() + 3601
            assert await store.match(hashes, cache, tenant="t") == 0
        if how != "beyond a quota":
            await store.delete_all(tenant="t")
    if how == "beyond a quota":
        async with BlockStore.open(tiers, tenants=["t?disk=16KiB"]) as store:
            await store.delete_all(tenant="t")
    async with BlockStore.open(tiers, tenants=["t"]) as store:
        assert not any(await store.present(hashes, cache, tenant="t"))


async def test_what_is_pinned_in_memory_alone_goes_down_at_the_end(
    tmp_path: Path,
) -> None:
    tiers, cache = ["memory:64KiB", f"disk:{tmp_path}?size=1MiB"], Filled(seed=1).cache
    async with BlockStore.open(tiers, write="back") as store:
        await store.put(A, cache, range(4))
        assert (await store.pin(A, cache)).prefix == 4
    async with BlockStore.open(tiers, write="back") as store:
        assert (await store.get(A, Filled().cache, range(4))).complete


async def test_a_size_of_which_all_is_pinned_takes_another_slab() -> None:
    """Each of which has something pinned too: nobody would ever let go of a slot."""
    small, large = Filled(56, seed=1), Filled(spec=replace(SPEC, head_dim=128), seed=2)
    hashes = chain(56)
    async with BlockStore.open(["memory:256KiB?slab=32KiB"]) as store:
        await store.put(A, large.cache, range(4))
        await store.put(hashes, small.cache, range(56))
        assert (await store.pin(A, large.cache)).prefix == 4
        for one in hashes[::8]:
            assert (await store.pin([one], small.cache)).prefix == 1
        assert (await store.put(B, large.cache, range(4))).complete
        assert await store.match(A, large.cache) == 4


async def test_what_was_put_by_a_clock_that_ran_ahead_grows_old_as_well(
    tmp_path: Path,
) -> None:
    address = TierAddress.parse(f"disk:{tmp_path}?size=1MiB")
    tenants, cache, now_s = Tenants(["t?ttl=3600"]), Filled(seed=1).cache, time.time()
    ahead = partial(add, now_s, 1e9)
    tier = await DiskTier.open(address, tenants, now=ahead)
    async with store_on(tier, tenants=tenants) as store:
        inside.tiers(store).memory.index.now = ahead
        assert (await store.put(A, cache, range(4), tenant="t")).complete
    tier = await DiskTier.open(address, tenants)
    async with store_on(tier, tenants=tenants) as store:
        assert await store.match(A, cache, tenant="t") == 4
        tier.index.now = partial(add, now_s, 3700.0)
        assert await store.match(A, cache, tenant="t") == 0


async def test_a_block_that_is_too_large_for_a_quota_says_so(tmp_path: Path) -> None:
    cache = Filled(seed=1).cache
    for tenant, said in (("t?memory=4KiB", "memory"), ("t?disk=4KiB", "on this disk")):
        tiers = ["memory:64KiB", f"disk:{tmp_path}/{said[0]}?size=64KiB"]
        async with BlockStore.open(tiers, tenants=[tenant]) as store:
            put = await store.put(A, cache, range(4), tenant="t")
            assert not put.complete
            assert all(said in why for why in put.missing.reasons)


# --- prefetching and pinning ----------------------------------------------------------


CACHE = Filled(seed=1).cache
MEMORY = "memory:256KiB"


@pytest.fixture(name="store")
async def _store(tmp_path: Path) -> AsyncIterator[BlockStore]:
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
