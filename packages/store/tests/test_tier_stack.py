"""Tiers together: who is asked, who is told, and what is written where."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from kvwire.kv.blocks import Bits, Ids
from kvwire.limits import KIB
from kvwire_store.index import Index
from kvwire_store.keys import Keys, as_keys
from kvwire_store.namespace import ABSENT, UNKNOWN, Namespace
from kvwire_store.threads import Threads
from kvwire_store.tier_stack import TierStack
from kvwire_store.tiers.base import Batch, BlockResult, BlockResults
from kvwire_store.tiers.slabs import Slabs
from packages.store.tests.fakes import FakeTier
from tests.support.caches import STORED as SPEC
from tests.support.caches import chain
from tests.support.pairs import turns, until

NAMESPACE = Namespace("kv", SPEC)
OTHER = Namespace("kv", replace(SPEC, layers=1))
# One in 256 is like this, and NumPy takes it for a shorter one.
ENDS_IN_ZERO = Namespace("kv", replace(SPEC, fingerprint="model 636"))
assert ENDS_IN_ZERO.digest[-1] == 0


@asynccontextmanager
async def hierarchy(*below: FakeTier, through: bool = True) -> AsyncIterator[TierStack]:
    threads = Threads()
    tiers = TierStack(
        Index(Slabs(1, 64 * KIB)), below, through=through, threads=threads
    )
    yield tiers
    await tiers.memory.settle()
    await asyncio.sleep(0)  # the loop still has what woke the test
    threads.close()
    tiers.memory.close()


def keys_of(count: int, namespace: Namespace = NAMESPACE) -> Keys:
    return as_keys(namespace.digest + one for one in chain(count))


async def fill(tiers: TierStack, keys: Keys, order: int = 0) -> Ids:
    """Blocks that are in memory, and in nobody's use."""
    memory = tiers.memory
    slots = await memory.take(NAMESPACE.image_bytes, keys.size)
    memory.index.mark(slots, np.full(keys.size, order, np.uint8))
    memory.index.name(keys, slots)
    memory.unpin(slots)
    return slots


def batch(tiers: TierStack, keys: Keys) -> Batch:
    images = tiers.memory.images(np.arange(keys.size), NAMESPACE.image_bytes)
    return Batch(keys, np.zeros(keys.size, np.uint8), images)


def knowing(tier: FakeTier, keys: Keys, order: int = 0) -> FakeTier:
    tier.orders |= dict.fromkeys(keys.tolist(), order)
    return tier


# --- looking --------------------------------------------------------------------------


async def test_a_block_is_found_where_it_is_first() -> None:
    keys = keys_of(4)
    upper, lower = FakeTier("upper"), FakeTier("lower")
    knowing(upper, keys[1:2], order=2)
    knowing(lower, keys[:3], order=3)
    async with hierarchy(upper, lower) as tiers:
        await fill(tiers, keys[:1], order=1)
        assert (await tiers.orders(keys)).tolist() == [1, 2, 3, ABSENT]
        assert (await tiers.find(keys)).tolist() == [True, True, True, False]
        number, orders = await tiers.source(keys, 0)
        assert (number, orders.tolist()) == (0, [ABSENT, 2, ABSENT, ABSENT])
        number, orders = await tiers.source(keys, 1)
        assert (number, orders.tolist()) == (1, [3, 3, 3, ABSENT])
        number, orders = await tiers.source(keys[3:], 0)
        assert (number, orders.tolist()) == (2, [ABSENT])


class FarTier(FakeTier):
    """A tier to which every question is a round trip, and has no time for one."""

    asks = True

    async def find(self, keys: Keys) -> BlockResults:
        raise AssertionError(keys)


async def test_what_memory_has_is_asked_of_nobody() -> None:
    async with hierarchy(FarTier()) as tiers:
        keys = keys_of(3)
        await fill(tiers, keys)
        assert (await tiers.find(keys)).all()
        assert (await tiers.orders(keys) == 0).all()


async def test_a_far_tier_is_not_asked_for_little() -> None:
    """Neither before it is read or written, nor when memory evicts what came there."""
    far, keys = FarTier("far"), keys_of(4)
    async with hierarchy(far) as tiers:
        number, orders = await tiers.source(keys, 0)
        assert (number, orders.tolist()) == (0, [UNKNOWN] * 4)
        assert not (await tiers.kept(keys, ask=False)).any()
        results = await tiers.write_through(NAMESPACE, batch(tiers, keys))
        assert (results == BlockResult.LANDED).all()
        assert not tiers.reason
        slots = await fill(tiers, keys)
        tiers.memory.below[slots] = True
        await tiers.memory.empty()
        assert not len(tiers.memory.index)
        assert len(far.written) == 1


async def test_a_slot_that_is_used_again_is_of_no_tier() -> None:
    """Its next block has to go down before it goes."""
    async with hierarchy(FarTier()) as tiers:
        slots = await fill(tiers, keys_of(16))
        tiers.memory.below[slots] = True
        await tiers.memory.empty()
        again = await tiers.memory.take(NAMESPACE.image_bytes, 16)
        assert not tiers.memory.below[again].any()
        tiers.memory.give_back(again)


class IndexedTier(FakeTier):
    """A tier whose index is in this process, as a disk's is."""

    def indexed(self, keys: Keys) -> Bits:
        return np.array([key in self.orders for key in keys.tolist()])


@pytest.mark.parametrize("above", [(), (FarTier("server"),)], ids=["disk", "server"])
async def test_a_block_that_a_disk_has_evicted_goes_from_memory_by_way_of_it(
    above: tuple[FakeTier, ...],
) -> None:
    """Whichever tier kept it once: nothing that needs a slot at once takes its slot."""
    disk, keys = IndexedTier("disk"), keys_of(16)
    async with hierarchy(*above, disk) as tiers:
        slots = await fill(tiers, keys)
        tiers.memory.below[slots] = True
        assert not tiers.memory.take_now(NAMESPACE.image_bytes, 1).size
        knowing(disk, keys)
        taken = tiers.memory.take_now(NAMESPACE.image_bytes, 1)
        assert taken.size == 1
        tiers.memory.give_back(taken)


@pytest.mark.parametrize(
    ("durable", "keepers"),
    [((True, False), "a"), ((False, True), "b"), ((False, False), "ab"), ((), "")],
)
async def test_who_has_to_have_a_block(durable: Sequence[bool], keepers: str) -> None:
    below = [FakeTier(n, durable=d) for n, d in zip("ab", durable, strict=False)]
    async with hierarchy(*below) as tiers:
        assert "".join(tier.name for tier in tiers.keepers) == keepers
        assert tiers.through == bool(below)


async def test_what_is_kept_is_touched_where_it_is() -> None:
    keys = keys_of(3)
    disk, cache = FakeTier("disk"), FakeTier("cache", durable=False)
    knowing(disk, keys[:2])
    knowing(cache, keys)
    async with hierarchy(cache, disk) as tiers:
        assert (await tiers.kept(keys)).tolist() == [True, True, False]
        assert disk.touched == [keys[:2].tolist()]
        assert not cache.touched
    async with hierarchy(cache, disk, through=False) as tiers:
        assert not (await tiers.kept(keys)).any()


# --- writing through ------------------------------------------------------------------


async def test_only_what_a_tier_lacks_is_written_there() -> None:
    keys = keys_of(3)
    full, some = FakeTier("full"), FakeTier("some")
    knowing(full, keys)
    knowing(some, keys[1:2])
    async with hierarchy(full, some) as tiers:
        results = await tiers.write_through(NAMESPACE, batch(tiers, keys))
        assert (results == BlockResult.LANDED).all()
        assert not tiers.reason
    assert full.written == []
    assert some.written == [[keys[0], keys[2]]]
    assert some.touched == [[keys[1]]]


async def test_the_best_of_the_tiers_that_count_counts() -> None:
    """One that is not durable does not, if another one is."""
    keys = keys_of(2)
    disk, cache = FakeTier("disk"), FakeTier("cache", durable=False)
    disk.refusing, disk.error = True, "it is full"
    async with hierarchy(cache, disk) as tiers:
        results = await tiers.write_through(NAMESPACE, batch(tiers, keys))
        assert (results == BlockResult.REFUSED).all()
        assert tiers.reason == "disk: it is full"
        assert cache.written == [keys.tolist()]
        disk.durable = False
        results = await tiers.write_through(NAMESPACE, batch(tiers, keys))
        assert (results == BlockResult.LANDED).all()


@pytest.mark.parametrize("first", [0, 1])
async def test_a_cancelled_write_through_leaves_no_tier_with_the_images(
    first: int,
) -> None:
    """Their slots are somebody else's as soon as it has returned."""
    gates = [asyncio.Event(), asyncio.Event()]
    below = [FakeTier("a"), FakeTier("b")]
    for tier, gate in zip(below, gates, strict=True):
        tier.before = gate.wait
    async with hierarchy(*below) as tiers:
        writing = asyncio.create_task(
            tiers.write_through(NAMESPACE, batch(tiers, keys_of(2)))
        )
        await until(lambda: all(tier.moving for tier in below))
        writing.cancel()
        await asyncio.sleep(0)
        gates[first].set()
        await turns(8)
        assert not below[first].moving
        assert not writing.done()
        gates[1 - first].set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert not any(tier.moving for tier in below)
        del writing  # its error has the images


async def test_a_tier_that_breaks_its_contract_does_not_hide_the_others() -> None:
    async def broken() -> None:
        raise ValueError("a bug")

    gate = asyncio.Event()
    bad, slow = FakeTier("bad"), FakeTier("slow")
    bad.before, slow.before = broken, gate.wait
    async with hierarchy(bad, slow) as tiers:
        writing = asyncio.create_task(
            tiers.write_through(NAMESPACE, batch(tiers, keys_of(2)))
        )
        await until(lambda: slow.moving)
        await turns(8)
        assert not writing.done()
        gate.set()
        with pytest.raises(ValueError, match="a bug"):
            await writing
        del writing  # its error has the images


# --- out of memory --------------------------------------------------------------------


async def test_what_leaves_memory_goes_to_the_first_tier_that_takes_it() -> None:
    keys = keys_of(4)
    refusing, taking, last = FakeTier("refusing"), FakeTier("taking"), FakeTier("last")
    refusing.refusing = True
    knowing(last, keys[:1])
    async with hierarchy(refusing, taking, last, through=False) as tiers:
        tiers.namespaces[NAMESPACE.digest] = NAMESPACE
        await fill(tiers, keys, order=5)
        await tiers.memory.empty()
        assert len(tiers.memory.index) == 0
        assert tiers.memory.stats().evicted_blocks == 4
    assert not refusing.written
    assert sorted(itertools.chain.from_iterable(taking.written)) == sorted(keys[1:])
    assert set(taking.orders.values()) == {5}
    assert not last.written


class Full(FakeTier):
    """Takes the first block of a write, and syncs nothing."""

    async def _write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        results = np.full(batch.keys.size, BlockResult.FAILED, np.uint8)
        results[:1] = await super()._write(namespace, batch.selected(np.arange(1)))
        return results

    async def flush(self) -> None:
        raise OSError("no room")


async def test_what_a_tier_has_not_taken_goes_to_the_next_one() -> None:
    keys, full, last = keys_of(4), Full("full"), FakeTier("last")
    async with hierarchy(full, last, through=False) as tiers:
        tiers.namespaces[NAMESPACE.digest] = NAMESPACE
        await fill(tiers, keys)
        await tiers.memory.write_down(every=True)
        assert len(full.orders) == 1
        assert full.orders.keys() | last.orders.keys() == set(keys.tolist())


async def test_a_tier_that_cannot_be_flushed_does_not_keep_others_from_it() -> None:
    flushed = []

    class Last(FakeTier):
        async def flush(self) -> None:
            flushed.append(self.name)

    async with hierarchy(Full("full"), Last("last")) as tiers:
        with pytest.raises(OSError, match="no room"):
            await tiers.flush()
    assert flushed == ["last"]


@pytest.mark.parametrize("other", [OTHER, ENDS_IN_ZERO])
async def test_blocks_of_two_spaces_leave_in_two_batches(other: Namespace) -> None:
    both = np.concatenate((keys_of(2), keys_of(2, other)))
    tier = FakeTier()
    async with hierarchy(tier, through=False) as tiers:
        tiers.namespaces |= {NAMESPACE.digest: NAMESPACE, other.digest: other}
        await fill(tiers, both)
        await tiers.memory.empty()
    assert sorted(map(len, tier.written)) == [2, 2]
    assert all(len({key[:16] for key in keys}) == 1 for keys in tier.written)
