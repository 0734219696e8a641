"""Many puts and gets at once in little memory: what lands is always what was put."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwire import Outcome, PagedCache
from kvwire.kv.blocks import Ids
from kvwire.kv.fragments import Fragments
from kvwire.limits import KIB
from kvwire.memory.copy import copy as plain_copy
from kvwire_store import BlockStore
from kvwire_store.keys import Keys, Orders, as_keys
from kvwire_store.request import Settled, StoreRequest
from kvwire_store.tiers.disk import DiskTier
from packages.store.tests.contract import NAMESPACE
from packages.store.tests.fakes import FakeTier
from packages.store.tests.files import Faults, disk, store_on
from tests.support import inside
from tests.support.caches import STORED as SPEC
from tests.support.caches import Filled, chain
from tests.support.depth import parameters
from tests.support.pairs import turns

CHAINS = 10
BLOCKS = 12
IDS = list(range(BLOCKS))


async def put_chain(store: BlockStore, seed: int) -> Outcome:
    source = Filled(BLOCKS, seed=seed)
    return await store.put(chain(BLOCKS, f"{seed}"), source.cache, IDS)


async def get_chain(store: BlockStore, seed: int) -> int:
    """Get a chain, check what has landed, and say how much of it that is."""
    source, target = Filled(BLOCKS, seed=seed), Filled(BLOCKS)
    outcome = await store.get(chain(BLOCKS, f"{seed}"), target.cache, IDS)
    here = outcome.landed.ids().tolist()
    assert np.array_equal(source.tokens(here), target.tokens(here))
    assert len(here) + len(outcome.missing) == BLOCKS
    return len(here)


@pytest.mark.parametrize("seed", parameters(range(2), every=2))
@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("room", ["16KiB", "64KiB", "1MiB"])
async def test_storm(tmp_path: Path, write: Any, room: str, seed: int) -> None:
    """Memory from 4 blocks up, a disk that holds half of all, and 100 calls at once."""
    chance = random.Random(seed)
    tiers = [f"memory:{room}", f"disk:{tmp_path}?size=260KiB&slab=64KiB"]
    async with BlockStore.open(tiers, write=write) as store:
        calls = [
            chance.choice((put_chain, get_chain))(store, chance.randrange(CHAINS))
            for _ in range(100)
        ]
        done = await asyncio.gather(*calls)
        assert sum(bool(one) for one in done) > 0
        assert any(isinstance(one, int) and one for one in done)
        for seed_of in range(CHAINS):
            assert (await put_chain(store, seed_of)).complete
            assert await get_chain(store, seed_of) == BLOCKS
        assert not len(inside.tiers(store).memory.in_flight)
        await check_no_pins(store)


async def check_no_pins(store: BlockStore) -> None:
    """Every slot is idle again: all there is can be evicted."""
    # What is cleared in the background is pinned while it is written below.
    await inside.tiers(store).memory.settle()
    index = inside.tiers(store).memory.index
    assert not index.pinned
    queues = [queue for by in index._queues.values() for queue in by.values()]
    assert sum(len(queue.pop(BLOCKS * 64)[1]) for queue in queues) == len(index)


async def test_two_puts_of_one_chain_write_it_once(tmp_path: Path) -> None:
    tier = await disk(tmp_path)
    async with store_on(tier) as store:
        done = await asyncio.gather(*(put_chain(store, 1) for _ in range(8)))
        assert all(one.complete for one in done)
        assert store.stats()["memory:128KiB"].written_blocks == BLOCKS
        assert tier.stats().written_blocks == BLOCKS


async def test_what_comes_while_a_get_asks_has_one_slot(
    tmp_path: Path,
) -> None:
    """Another get brings it to memory before this one knows which tier has it."""
    async with store_on(await disk(tmp_path)) as store:
        await put_chain(store, 1)
    go, asked = asyncio.Event(), asyncio.Event()

    class SlowFind(DiskTier):
        async def find(self, keys: Keys) -> Orders:
            orders = await super().find(keys)
            if not asked.is_set():
                asked.set()
                await go.wait()
            return orders

    async with store_on(await disk(tmp_path, kind=SlowFind)) as store:
        first = asyncio.create_task(get_chain(store, 1))
        await asked.wait()
        assert await get_chain(store, 1) == BLOCKS
        go.set()
        assert await first == BLOCKS
        index = inside.tiers(store).memory.index
        assert index.slabs.used.sum() == len(index) == BLOCKS


async def test_a_put_whose_blocks_others_bring_meanwhile_writes_none_of_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them are on their way by the time that there is room."""
    tier = FakeTier()
    tier.asks = True
    async with store_on(tier) as store:
        memory = inside.tiers(store).memory
        take, keys = memory.take, as_keys([NAMESPACE.digest + chain(1, "1")[0]])

        async def busy(nbytes: int, count: int, tenant: int) -> Ids:
            memory.in_flight.begin(keys)
            asyncio.get_running_loop().call_later(0.01, memory.in_flight.end, keys)
            monkeypatch.setattr(memory, "take", take)
            return await take(nbytes, count, tenant)

        monkeypatch.setattr(memory, "take", busy)
        cache = Filled(1, seed=1).cache
        assert (await store.put(chain(1, "1"), cache, [0])).complete
    assert tier.written == [keys.tolist()]


class Gate:
    """A hook that holds back writes until it is opened, from a thread's view."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self.open.set()

    def __call__(self, call: str) -> None:
        if call == "pwritev" and not self.open.is_set():
            self.reached.set()
            self.open.wait()


def on_threads(
    monkeypatch: pytest.MonkeyPatch, copy: Callable[[Fragments, Fragments], None]
) -> None:
    """Copy in another way, and never on the loop."""
    monkeypatch.setattr("kvwire_store.operations.base.copy", copy)
    monkeypatch.setattr("kvwire_store.operations.base.TURN_BYTES", 0)


async def test_a_block_that_is_being_copied_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A get beside the put waits for its copy, and never has a part of it."""
    copying, go_on = threading.Event(), threading.Event()

    def slow_copy(source: Fragments, destination: Fragments) -> None:
        copying.set()
        assert go_on.wait(20)
        plain_copy(source, destination)

    on_threads(monkeypatch, slow_copy)
    async with BlockStore.open(["memory:64KiB"]) as store:
        put = asyncio.create_task(put_chain(store, 1))
        await asyncio.to_thread(copying.wait)
        assert await store.match(chain(BLOCKS, "1")) == 0
        get = asyncio.create_task(get_chain(store, 1))
        again = asyncio.create_task(put_chain(store, 1))
        await turns(10)
        assert not get.done()
        assert not again.done()
        go_on.set()
        assert await get == BLOCKS
        assert (await put).complete
        assert (await again).complete
        assert store.counters.present_blocks == BLOCKS


async def test_a_put_is_drained_before_it_is_complete(tmp_path: Path) -> None:
    """Its blocks may be written to while the disk still has to take them."""
    gate = Gate()
    source, target, hashes = Filled(BLOCKS, seed=1), Filled(BLOCKS), chain(BLOCKS)
    async with store_on(await disk(tmp_path, hook=gate)) as store:
        gate.open.clear()
        request = store.put(hashes, source.cache, IDS)
        await request.drained()
        assert not request.done()
        assert request.is_drained
        expected = source.tokens(IDS)
        for tensor in source.tensors:
            tensor[:] = 0
        # It can be got already.
        assert (await store.get(hashes, target.cache, IDS)).complete
        assert np.array_equal(target.tokens(IDS), expected)
        gate.open.set()
        assert (await request).complete
        assert request.outcome is not None
    async with store_on(await disk(tmp_path)) as store:
        again = Filled(BLOCKS)
        assert (await store.get(hashes, again.cache, IDS)).complete
        assert np.array_equal(again.tokens(IDS), expected)


@pytest.mark.parametrize("into_cache", [False, True])
async def test_what_is_not_copied_yet_is_not_drained(
    monkeypatch: pytest.MonkeyPatch, into_cache: bool
) -> None:
    """Of two cache groups one is through, and the other is just being copied."""
    second, go_on = threading.Event(), threading.Event()
    copies: list[int] = []

    def slow_copy(source: Fragments, destination: Fragments) -> None:
        copies.append(source.nbytes)
        if len(copies) == 2:
            second.set()
            assert go_on.wait(20)
        plain_copy(source, destination)

    ends = Filled(BLOCKS, seed=1), Filled(BLOCKS, seed=2)
    cache = PagedCache.grouped(
        {name: (SPEC, end.tensors) for name, end in zip("ab", ends, strict=True)}
    )
    hashes, ids = {"a": chain(4), "b": chain(4)}, {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}
    async with BlockStore.open(["memory:64KiB"]) as store:
        if into_cache:
            await store.put(hashes, cache, ids)
        on_threads(monkeypatch, slow_copy)
        request = (store.get if into_cache else store.put)(hashes, cache, ids)
        await asyncio.to_thread(second.wait)
        await turns(10)
        assert not request.is_drained
        go_on.set()
        await request.drained()
        assert len(copies) == 2
        assert (await request).complete


async def test_a_cancelled_await_does_not_stop_the_put(tmp_path: Path) -> None:
    gate, source, hashes = Gate(), Filled(BLOCKS, seed=1), chain(BLOCKS)
    async with store_on(await disk(tmp_path, hook=gate)) as store:
        gate.open.clear()
        request = store.put(hashes, source.cache, IDS)

        async def wait(request: StoreRequest) -> Outcome:
            return await request

        waiting = asyncio.create_task(wait(request))
        await asyncio.to_thread(gate.reached.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not request.done()
        gate.open.set()
        await request.drained()
        assert (await request).complete
        assert await store.match(hashes) == BLOCKS


async def test_awaits_that_were_cancelled_are_not_kept_until_the_end() -> None:
    """A caller may wait for a slow get in steps, each with a limit."""
    get = Settled(asyncio.get_running_loop())
    kept = weakref.WeakSet[asyncio.Future[Outcome]]()
    for _ in range(100):
        waiter = get.waiter()
        kept.add(waiter)
        waiter.cancel()
    del waiter
    assert len(kept) == 1
    last = get.waiter()
    get.settle(None)
    await last
    assert get.done()


async def test_blocks_that_leave_memory_stay_readable(tmp_path: Path) -> None:
    """While a disk takes them; and nothing else gets their slots before it has."""
    gate = Gate()
    tier = await disk(tmp_path, hook=gate)
    async with store_on(tier, memory="memory:64KiB", write="back") as store:
        assert (await put_chain(store, 1)).complete
        gate.open.clear()
        second = store.put(chain(BLOCKS, "2"), Filled(BLOCKS, seed=2).cache, IDS)
        await asyncio.to_thread(gate.reached.wait)
        assert not second.done()
        assert await get_chain(store, 1) == BLOCKS
        gate.open.set()
        assert (await second).complete
        assert await get_chain(store, 1) == BLOCKS
        assert await get_chain(store, 2) == BLOCKS


async def test_memory_without_a_tier_below_forgets() -> None:
    async with BlockStore.open(["memory:64KiB"]) as store:
        for seed in range(3):
            assert (await put_chain(store, seed)).complete
        assert await get_chain(store, 2) == BLOCKS
        # Sixteen slots: of the chain before the head is left, and the tail is gone.
        assert await store.match(chain(BLOCKS, "1")) == 16 - BLOCKS
        assert await store.match(chain(BLOCKS, "0")) == 0


async def test_a_chain_longer_than_memory_keeps_its_head() -> None:
    source, hashes = Filled(64, seed=1), chain(64)
    async with BlockStore.open(["memory:64KiB"]) as store:
        assert (await store.put(hashes, source.cache, list(range(64)))).complete
        assert await store.match(hashes) == 16


async def test_demotion_to_a_disk_that_fails_frees_memory(tmp_path: Path) -> None:
    faults = Faults()
    tier = await disk(tmp_path, hook=faults)
    async with store_on(tier, memory="memory:64KiB", write="back") as store:
        faults.full()
        for seed in range(4):
            assert (await put_chain(store, seed)).complete
        assert await get_chain(store, 3) == BLOCKS
        assert "No space left" in store.report[tier.name]
    gc.collect()


async def test_tasks_that_get_in_sequence_take_turns() -> None:
    """Gets that complete at once hold the loop for a few blocks, not for a MiB."""
    spec = replace(SPEC, layers=16, block_tokens=16, kv_heads=8, head_dim=8)
    source = Filled(4, spec=spec)
    order: list[int] = []
    async with BlockStore.open(["memory:16MiB"]) as store:
        hashes = chain(4, "turns")
        assert (await store.put(hashes, source.cache, range(4))).complete

        async def reads(number: int) -> None:
            target = Filled(1, spec=spec)
            for _ in range(20):
                assert (await store.get(hashes[:1], target.cache, [0])).complete
                order.append(number)

        await asyncio.gather(*(reads(number) for number in range(8)))
    assert source.cache.groups["kv"].spec.block_bytes == 64 * KIB
    runs = [len(list(run)) for _, run in groupby(order)]
    assert len(order) == 160
    assert max(runs) <= 6


async def test_a_burst_of_gets_copies_a_little_in_each_turn() -> None:
    """However many are begun before the first await; a close waits for all."""
    spec = replace(SPEC, layers=16, block_tokens=16, kv_heads=8, head_dim=8)
    source = Filled(1, spec=spec, seed=1)
    targets = [Filled(1, spec=spec) for _ in range(40)]
    hashes = chain(2, "burst")
    async with BlockStore.open(["memory:16MiB"]) as store:
        assert (await store.put(hashes[:1], source.cache, [0])).complete
        gets = [store.get(hashes[:1], one.cache, [0]) for one in targets]
        absent = store.get(hashes[1:], targets[0].cache, [0])
        before = 0
        while before < 20:
            now = sum(get.done() for get in gets)
            assert now - before <= 4
            before = now
            await asyncio.sleep(0)
        assert not gets[-1].is_drained
    assert all([(await get).complete for get in gets])
    assert (await absent).missing
    assert all(get.is_drained for get in (*gets, absent))
    for target in targets:
        assert np.array_equal(source.tokens([0]), target.tokens([0]))


async def test_gets_without_memory_in_their_turn_are_over_and_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory for it")

    spec = replace(SPEC, layers=16, block_tokens=16, kv_heads=8, head_dim=8)
    source = Filled(1, spec=spec, seed=1)
    targets = [Filled(1, spec=spec) for _ in range(8)]
    async with BlockStore.open(["memory:16MiB"]) as store:
        assert (await store.put(chain(1), source.cache, [0])).complete
        gets = [store.get(chain(1), one.cache, [0]) for one in targets]
        monkeypatch.setattr("kvwire_store.operations.base.copy", fail)
        ends = [get.outcome for get in gets if get.done()]
        assert all(end is not None and end.complete for end in ends)
        for get in gets[len(ends) :]:
            with pytest.raises(MemoryError):
                await get
    assert len(ends) < len(gets)
    assert all(get.is_drained for get in gets)
