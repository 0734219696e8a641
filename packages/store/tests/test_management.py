"""Blocks that are deleted, pinned, and of tenants, in memory and below."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvwire.kv.blocks import Ids
from kvwire_store import BlockStore
from kvwire_store.keys import Keys, as_keys
from kvwire_store.namespace import Namespace
from kvwire_store.tenants import Tenants
from kvwire_store.tiers.base import Batch, BlockResults
from kvwire_store.tiers.disk import DiskTier
from kvwire_store.tiers.slabs import GRAIN_BYTES
from packages.store.tests.contract import NAMESPACE
from packages.store.tests.fakes import FakeTier
from packages.store.tests.files import disk, store_on
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, cache = ["memory:64KiB", f"disk:{tmp_path}?size=1MiB"], Filled(seed=1).cache
    with monkeypatch.context() as patch:
        patch.setattr("kvwire_store.tiers.disk.time", lambda: time.time() + 1e9)
        async with BlockStore.open(tiers, tenants=["t?ttl=3600"]) as store:
            await store.put(A, cache, range(4), tenant="t")
    async with BlockStore.open(tiers, tenants=["t?ttl=3600"]) as store:
        assert await store.match(A, cache, tenant="t") == 4
        (tier,) = inside.tiers(store).below
        tier.index.now = lambda: time.time() + 3601  # type: ignore[attr-defined]
        assert await store.match(A, cache, tenant="t") == 0


async def test_a_block_that_is_too_large_for_a_quota_says_so(tmp_path: Path) -> None:
    cache = Filled(seed=1).cache
    for tenant, said in (("t?memory=4KiB", "memory"), ("t?disk=4KiB", "on this disk")):
        tiers = ["memory:64KiB", f"disk:{tmp_path}/{said[0]}?size=64KiB"]
        async with BlockStore.open(tiers, tenants=[tenant]) as store:
            put = await store.put(A, cache, range(4), tenant="t")
            assert not put.complete
            assert all(said in why for why in put.missing.reasons)
