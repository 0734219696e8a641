"""Blocks that are located, fetched ahead, let go of, pinned, retained and moved."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kvwire import BlockState, BlockStore, Placement, UsageError
from kvwire.store.address import TierAddress
from kvwire.store.keys import Keys, as_keys
from kvwire.store.namespace import Namespace
from kvwire.store.placement import Placing, Verb, VerbKind, all_placed
from kvwire.store.tiers.base import Batch, BlockResult, BlockResults
from kvwire.store.tiers.disk import DiskTier
from tests.store.fakes import FakeTier
from tests.store.files import store_on
from tests.support import inside
from tests.support.caches import Filled, chain
from tests.support.pairs import turns, until

A, B = chain(4, "a"), chain(4, "b")
CACHE = Filled(seed=1).cache
MEMORY = "memory:256KiB"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[BlockStore]:
    """A store of memory and a disk; both have A and B."""
    tiers = [MEMORY, f"disk:{tmp_path}?size=1MiB"]
    async with BlockStore.open(tiers, tenants=["t"]) as store:
        assert (await store.put(A + B, CACHE, range(8))).complete
        yield store


def places(placement: Placement) -> list[list[bool]]:
    return [bits.tolist() for bits in placement.held.values()]


async def test_blocks_are_located_in_each_tier(store: BlockStore) -> None:
    await store.demote(B, CACHE)
    found = await store.locate(A[:1] + B[:1] + chain(1, "c") + A[:1], CACHE)
    assert [name.partition(":")[0] for name in found.held] == ["memory", "disk"]
    assert places(found) == [[True, False, False, True], [True, True, False, True]]
    assert found.counts == {"done": 3, "missing": 1}
    assert (found.prefix, found.complete, len(found)) == (2, False, 4)
    assert found.reason(2) == "it is not in the store"
    assert found.reason(0) == ""
    assert repr(found) == "<Placement of 4 blocks: 3 done, 1 missing>"
    # Without a cache, and for a tenant that has none.
    assert (await store.locate(A)).complete
    assert (await store.locate(A, tenant="t")).missing.all()
    with pytest.raises(UsageError, match="the tenants are t"):
        await store.locate(A, tenant="u")


async def test_what_is_demoted_is_on_the_disk_and_what_is_fetched_in_memory(
    store: BlockStore,
) -> None:
    assert (await store.demote(A + B, CACHE)).complete
    assert places(await store.locate(A + B)) == [[False] * 8, [True] * 8]
    before = store.counters.gets, store.counters.hit_blocks
    assert (await store.prefetch(B, CACHE)).complete
    assert (store.counters.gets, store.counters.hit_blocks) == before
    assert places(await store.locate(A + B)) == [[False] * 4 + [True] * 4, [True] * 8]
    target = Filled()
    assert (await store.get(A + B, target.cache, range(8))).complete
    assert (target.tokens([*range(8)]) == Filled(seed=1).tokens([*range(8)])).all()


async def test_what_is_in_use_or_pinned_stays_when_it_is_demoted(
    store: BlockStore,
) -> None:
    await store.pin(A[:1], CACHE)
    memory = inside.tiers(store).memory
    (digest,) = inside.tiers(store).namespaces
    keys = as_keys([digest + A[1]])
    slots = memory.index.find(keys)
    memory.index.pin(keys, slots)
    told = await store.demote(A, CACHE)
    memory.unpin(keys, slots)
    assert told.deferred.tolist() == [True, True, False, False]
    assert "in use or pinned" in told.reason(0)
    assert places(await store.locate(A))[0] == [True, True, False, False]


async def test_without_a_tier_below_nothing_is_demoted() -> None:
    async with BlockStore.open(["memory:64KiB"]) as store:
        await store.put(A, CACHE, range(4))
        told = await store.demote(A, CACHE)
        assert told.refused.all()
        assert told.reasons == ("there is no tier below memory",)
        with pytest.raises(UsageError, match="tier='disk': the tiers are none"):
            await store.demote(A, CACHE, tier="disk")
        with pytest.raises(UsageError, match="tier='disk': the tiers are memory:64KiB"):
            await store.prefetch(A, CACHE, tier="disk")


async def test_a_tier_that_takes_nothing_defers() -> None:
    tier = FakeTier()
    async with store_on(tier, write="back") as store:
        await store.put(A, CACHE, range(4))
        tier.refusing = True
        tier.error = "it is full"
        told = await store.demote(A, CACHE)
        assert told.deferred.all()
        assert told.reasons == ("fake: it is full",)
        assert (await store.locate(A, CACHE)).complete
        tier.refusing = False
        assert (await store.demote(A, CACHE)).complete
        for verb in (store.pin, store.unpin):
            told = await verb(A, CACHE)
            assert told.refused.all()
            assert told.reasons[0].startswith("fake cannot ")
        # It has no bytes to give, whatever it has said.
        told = await store.prefetch(A, CACHE)
        assert told.missing.all()


async def test_a_cancelled_demote_loses_nothing() -> None:
    tier, go = FakeTier(), asyncio.Event()
    tier.before = go.wait
    async with store_on(tier, write="back") as store:
        await store.put(A, CACHE, range(4))
        demoting = asyncio.create_task(store.demote(A, CACHE))
        await until(lambda: tier.moving)
        demoting.cancel()
        await turns(5)
        assert not demoting.done(), "the write is finished first"
        assert (await store.locate(A, CACHE)).complete
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await demoting
        assert (await store.locate(A, CACHE)).complete
        assert inside.tiers(store).memory.index.pinned == 0
        assert inside.tiers(store).moving_bytes.sum() == 0


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
        await store.demote(A, CACHE)
        fetching = [asyncio.create_task(store.prefetch(A, CACHE)) for _ in range(2)]
        await until(lambda: tier.reads)
        got = store.get(A, Filled().cache, range(4))
        await turns(10)
        fetching[1].cancel()
        tier.go.set()
        assert (await got).complete
        assert (await fetching[0]).complete
        assert tier.reads == 1
        assert (await store.locate(A, CACHE)).complete
        with pytest.raises(asyncio.CancelledError):
            await fetching[1]


async def test_a_pin_ends_by_itself(tmp_path: Path) -> None:
    tiers = ["memory:128KiB", f"disk:{tmp_path}?size=128KiB&slab=64KiB"]
    now = [1e9]
    for ahead_s, left in ((50, 4), (100, 0)):
        async with BlockStore.open(tiers) as store:
            tier = inside.tiers(store).below[0]
            assert isinstance(tier, DiskTier)
            for index in (inside.tiers(store).memory.index, tier._index):
                index.now = lambda: now[0]
            await store.put(A, CACHE, range(4))
            assert (await store.pin(A, CACHE, ttl_s=100)).complete
            # A second pin that would end before changes nothing.
            assert (await store.pin(A, CACHE, ttl_s=1)).complete
            now[0] += ahead_s
            for number in range(20):
                await store.put(chain(8, f"{number} {left}"), CACHE, range(8))
            assert (await store.locate(A, CACHE)).counts.get("done", 0) == left


async def test_more_than_a_quarter_is_clipped_from_the_head_on() -> None:
    async with BlockStore.open(["memory:64KiB"]) as store:
        await store.put(A + B, CACHE, range(8))
        told = await store.pin(A + B, CACHE)
        assert (told.prefix, told.counts) == (4, {"done": 4, "clipped": 4})
        assert "may pin and retain no more" in told.reason(7)
        # What is retained counts as well, and an end makes room.
        assert (await store.retain(B, CACHE, priority=80)).clipped.all()
        await store.unpin(A, CACHE)
        assert (await store.retain(B, CACHE, priority=80)).complete
        assert (await store.pin(A, CACHE)).clipped.all()
        assert (await store.retain(B, CACHE, priority=50)).complete
        assert (await store.pin(A, CACHE)).complete


@pytest.mark.parametrize("evict", ["lru", "s3fifo"])
async def test_what_is_retained_goes_last_and_what_is_worth_less_first(
    evict: str,
) -> None:
    async with BlockStore.open([f"memory:64KiB?evict={evict}"]) as store:
        await store.put(A + B, CACHE, range(8))
        await store.put(chain(8, "c"), CACHE, range(8))
        assert (await store.retain(A[:2], CACHE, priority=80)).complete
        assert (await store.retain(chain(2, "c"), CACHE, priority=10)).complete
        await store.put(chain(2, "d"), CACHE, range(2))
        assert (await store.locate(chain(2, "c"), CACHE)).missing.all()
        assert (await store.locate(A + B, CACHE)).complete
        for number in range(4):
            await store.put(chain(4, f"{number}"), CACHE, range(4))
        found = await store.locate(A + B, CACHE)
        assert found.done.tolist() == [True] * 2 + [False] * 6


async def test_a_retention_ends_by_itself() -> None:
    async with BlockStore.open(["memory:64KiB"]) as store:
        index, now = inside.tiers(store).memory.index, [1e9]
        index.now = lambda: now[0]
        await store.put(A, CACHE, range(4))
        assert (await store.retain(A, CACHE, priority=80, ttl_s=10)).complete
        assert index.retained_bytes.sum() == 4 * 4096
        now[0] += 10
        for number in range(4):
            await store.put(chain(8, f"{number}"), CACHE, range(8))
        assert (await store.locate(A, CACHE)).missing.all()
        assert index.retained_bytes.sum() == 0


async def test_no_more_is_moved_at_once_than_a_tenant_may(tmp_path: Path) -> None:
    tiers = [MEMORY, f"disk:{tmp_path}?size=1MiB"]
    tenants = ["t?moving=8KiB", "u"]
    async with BlockStore.open(tiers, tenants=tenants) as store:
        for tenant in ("t", "u"):
            await store.put(A, CACHE, range(4), tenant=tenant)
        told = await store.demote(A, CACHE, tenant="t")
        assert told.counts == {"done": 2, "clipped": 2}
        assert (
            told.reason(3) == "2 blocks are the most that its tenant may move at once"
        )
        assert (await store.demote(A, CACHE, tenant="u")).complete
        inside.tiers(store).moving_bytes[1] = 4096
        told = await store.demote(A[2:], CACHE, tenant="t")
        assert told.counts == {"done": 1, "deferred": 1}


async def test_blocks_of_no_tenant_have_bounds_too(tmp_path: Path) -> None:
    tiers = [MEMORY, f"disk:{tmp_path}?size=1MiB"]
    bounds = "?pinned=8KiB&moving=12KiB"
    async with BlockStore.open(tiers, tenants=[bounds]) as store:
        await store.put(A, CACHE, range(4))
        assert (await store.pin(A, CACHE)).counts == {"done": 2, "clipped": 2}
        await store.unpin(A, CACHE)
        assert (await store.demote(A, CACHE)).counts == {"done": 3, "clipped": 1}
    async with BlockStore.open(tiers, tenants=["t", bounds]) as store:
        assert (await store.pin(A, CACHE)).counts == {"done": 2, "clipped": 2}
        assert list(store.tenant_stats()) == ["", "t"]
    for wrong in ("?quota=1MiB", "?ttl=5"):
        with pytest.raises(UsageError, match="unknown option"):
            BlockStore.open(tiers, tenants=[wrong])
    with pytest.raises(UsageError, match="a name appears twice"):
        BlockStore.open(tiers, tenants=[bounds, bounds])


async def test_wrong_arguments_are_refused_by_name(store: BlockStore) -> None:
    for ttl_s in (0, -1, float("nan"), "soon"):
        with pytest.raises(UsageError, match="ttl_s="):
            await store.pin(A, ttl_s=ttl_s)  # type: ignore[arg-type]
    for priority in (-1, 101, 0.5, True):
        with pytest.raises(UsageError, match="priority="):
            await store.retain(A, priority=priority)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="to='n': no node with this name"):
        await store.move(A, to="n")


def test_reasons_are_those_of_the_blocks_left() -> None:
    placing = Placing(3, BlockState.MISSING, "nowhere")
    placing.rule(np.array([1]), BlockState.DONE)
    placing.rule(np.array([2]), BlockState.REFUSED, "not here")
    placing.rule(np.array([], np.int64), BlockState.DEFERRED, "of none")
    told = placing.end()
    assert told.reasons == ("nowhere", "not here")
    assert [told.reason(at) for at in range(3)] == ["nowhere", "", "not here"]


async def test_an_earlier_pin_survives_one_that_fails(tmp_path: Path) -> None:
    disk = await DiskTier.open(TierAddress.parse(f"disk:{tmp_path}?size=1MiB"))
    async with store_on(disk, memory=MEMORY) as store:
        await store.put(A, CACHE, range(4))
        assert (await store.pin(A[:2], CACHE)).complete
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk._rows, "pin", failing)
            told = await store.pin(A, CACHE)
        # Memory has pinned them, and would forget that at the close.
        assert told.deferred.all()
        assert "pinning" in told.reason(0)
        (digest,) = inside.tiers(store).namespaces
        keys = as_keys(map(digest.__add__, A))
        assert disk._index.kept(keys).tolist() == [True, True, False, False]
        assert (await store.pin(A, CACHE)).complete


async def test_what_a_disk_cannot_write_of_pins_is_as_before(tmp_path: Path) -> None:
    """Or blocks whose unpin has failed go, though the disk still has their pins."""
    disk = await DiskTier.open(TierAddress.parse(f"disk:{tmp_path}?size=1MiB"))
    async with store_on(disk, memory=MEMORY) as store:
        await store.put(A, CACHE, range(4))
        assert (await store.pin(A[:2], CACHE, ttl_s=60)).complete
        (namespace,) = inside.tiers(store).namespaces.values()
        keys = as_keys(map(namespace.digest.__add__, A))
        pinned = keys[:2]
        ends = disk._index.ends(disk._index.find(pinned)).tolist()

        def same() -> bool:
            kept = disk._index.kept(keys).tolist()
            now = disk._index.ends(disk._index.find(pinned)).tolist()
            return (kept, now) == ([True, True, False, False], ends)

        for verb in (Verb.pin(3600), Verb.pin(None), Verb(VerbKind.UNPIN)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(disk._rows, "pin", failing)
                told = await disk.apply(verb, namespace, keys)
            assert told.deferred.all()
            assert same()
        assert (await disk.apply(Verb(VerbKind.UNPIN), namespace, keys)).complete
        assert not disk._index.kept(keys).any()
        assert not disk._rows.pins()[0].size


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


async def test_a_tier_that_is_away_counts_for_what_protects() -> None:
    """Or an unpin were done, and the server went on with the pin."""
    tier = AwayTier()
    async with store_on(tier, write="back") as store:
        await store.put(A, CACHE, range(4))
        for call in (
            store.pin(A, CACHE),
            store.unpin(A, CACHE),
            store.retain(A, CACHE, priority=80),
        ):
            told = await call
            assert told.deferred.all()
            assert told.reasons == ("away",)
        # Where blocks are looked for, one place is enough.
        assert (await store.locate(A, CACHE)).complete


class AwayTier(FakeTier):
    """Cannot be reached."""

    async def apply(self, verb: Verb, namespace: Namespace, keys: Keys) -> Placement:
        return all_placed(keys.size, BlockState.DEFERRED, "away")
