"""The store as its users see it."""

from __future__ import annotations

import asyncio
import gc
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvwire import ClosedOK, KVSpec, PagedCache, UsageError
from kvwire.kv.layout import Layout
from kvwire.memory.container import MemoryLimit
from kvwire_certify.conformance.rig import open_descriptors
from kvwire_store import BlockStore, StoreServer
from kvwire_store import store as store_module
from kvwire_store.address import TierAddress
from kvwire_store.placement import BlockState, all_placed
from kvwire_store.tenants import Tenants
from kvwire_store.tier_stack import UNSAID
from kvwire_store.tiers.base import Tier
from packages.store.tests.fakes import FakeTier
from packages.store.tests.files import store_on
from tests.support import inside
from tests.support.caches import STORED as SPEC
from tests.support.caches import STORED_LARGE as LARGE
from tests.support.caches import Filled, chain
from tests.support.logs import warned
from tests.support.pairs import turns, until
from tests.support.scopes import in_scope
from tests.support.waiting import eventually

MEMORY = ["memory:256KiB"]
# By then the use of a store is over.
MANY_TURNS = 2000
# Kinds of tiers that are not opened without one.


def _missing(library: str) -> bool:
    """Return whether it, or a library of the system that it needs, is not installed.

    It is imported before the first test: the descriptors that it opens are no test's.
    """
    try:
        importlib.import_module(library)
    except ImportError:
        return True
    return False


LIBRARIES = {"object": "obstore", "redis": "redis"}
MISSING = {scheme for scheme, library in LIBRARIES.items() if _missing(library)}


def same(a: Filled, blocks: list[int], b: Filled, others: list[int]) -> bool:
    return np.array_equal(a.tokens(blocks), b.tokens(others))


async def test_what_was_put_is_got() -> None:
    source, target, hashes = Filled(seed=1), Filled(), chain(5)
    async with BlockStore.open(MEMORY) as store:
        stored = await store.put(hashes, source.cache, [3, 1, 4, 15, 9])
        assert stored.complete
        assert await store.match(hashes) == 5
        outcome = await store.get(hashes, target.cache, [0, 2, 5, 7, 8])
    assert outcome.complete
    assert outcome.usable_prefix == 5
    assert outcome.nbytes == 5 * SPEC.block_bytes
    assert same(source, [3, 1, 4, 15, 9], target, [0, 2, 5, 7, 8])
    assert not target.tokens([1, 3, 4, 6]).any()


async def test_no_blocks_are_an_empty_result(tmp_path: Path) -> None:
    tiers = [*MEMORY, f"disk:{tmp_path}?size=1MiB"]
    async with BlockStore.open(tiers) as store:
        for call in (store.put, store.get):
            request = call([], Filled().cache, [])
            outcome = await request
            await request.drained()
            assert outcome.complete
            assert (outcome.usable_tokens, len(outcome.landed)) == (0, 0)
            assert outcome.missing == {}
            # Another time, with the plan of the first.
            assert (await call([], Filled().cache, [])).complete
        assert await store.match([]) == 0


@pytest.mark.parametrize("tier", ["memory", "below"])
async def test_one_get_of_blocks_in_two_orders(tier: str, tmp_path: Path) -> None:
    """As many of each: neither has the images of the other."""
    sources = Filled(seed=1), Filled(16, SPEC, "HND", seed=2)
    target, hashes = Filled(), chain(4)
    tiers = [*MEMORY, f"disk:{tmp_path}?size=1MiB"]
    async with BlockStore.open(tiers) as store:
        await store.put(hashes[:2], sources[0].cache, [3, 1])
        await store.put(hashes[2:], sources[1].cache, [4, 5])
        if tier == "below":
            await inside.tiers(store).memory.empty()
        assert (await store.get(hashes, target.cache, [0, 2, 5, 7])).complete
    assert same(sources[0], [3, 1], target, [0, 2])
    assert same(sources[1], [4, 5], target, [5, 7])


async def test_what_is_not_there_is_missing() -> None:
    source, target, hashes = Filled(seed=1), Filled(), chain(4)
    async with BlockStore.open(MEMORY) as store:
        await store.put([hashes[0], hashes[1], hashes[3]], source.cache, [0, 1, 3])
        assert await store.match(hashes) == 2
        outcome = await store.get(hashes, target.cache, [4, 5, 6, 7])
    assert not outcome.complete
    assert outcome.usable_prefix == 2
    assert dict(outcome.missing) == {("kv", 6): "it is not in the store"}
    assert same(source, [0, 1, 3], target, [4, 5, 7])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_tokens", [1, 2, 4, 8, 6])
async def test_another_layout_and_block_size(layout: Layout, block_tokens: int) -> None:
    """Hashes of four tokens each, and blocks of any size on the other side."""
    fields = {name: getattr(SPEC, name) for name in SPEC.__slots__}
    spec = KVSpec(**fields | {"block_tokens": block_tokens})
    source, hashes = Filled(seed=1), chain(6)
    target = Filled(24, spec, layout)
    blocks = list(range(24 // block_tokens))[::-1]
    async with BlockStore.open(MEMORY) as store:
        await store.put(hashes, source.cache, [5, 4, 3, 2, 1, 0])
        assert await store.match(hashes, target.cache, hash_tokens=4) == 6
        outcome = await store.get(hashes, target.cache, blocks, hash_tokens=4)
        assert outcome.complete
        assert same(source, [5, 4, 3, 2, 1, 0], target, blocks)
        # And back, from such blocks into such as these.
        again, names = Filled(), chain(6, "again")
        await store.put(names, target.cache, blocks, hash_tokens=4)
        assert (await store.get(names, again.cache, [0, 1, 2, 3, 4, 5])).complete
    assert same(source, [5, 4, 3, 2, 1, 0], again, [0, 1, 2, 3, 4, 5])


async def test_a_closed_store_says_so() -> None:
    store = await BlockStore.open(MEMORY)
    await store.close()
    await store.close()
    with pytest.raises(ClosedOK):
        store.put(chain(1), Filled().cache, [0])
    with pytest.raises(ClosedOK):
        await store.match(chain(1))


async def test_a_close_that_was_cancelled_is_gone_on_with() -> None:
    """Whether it was writing blocks down or closing a tier."""
    tiers = [FakeTier("first"), FakeTier("second")]
    store = store_on(*tiers, write="back")
    hashes = chain(4)
    await store.put(hashes, Filled(seed=1).cache, range(4))
    go = asyncio.Event()
    tiers[0].before, tiers[1].closing = go.wait, asyncio.Event()
    closing = asyncio.create_task(store.close())
    await until(lambda: tiers[0].moving)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert [tier.closes for tier in tiers] == [0, 0]
    go.set()
    await until(lambda: tiers[1].closes)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    both = [asyncio.create_task(store.close()) for _ in range(2)]
    await turns(4)
    assert not any(one.done() for one in both)
    tiers[1].closing.set()
    await asyncio.gather(*both)
    assert sum(map(len, tiers[0].written)) == 4
    assert [tier.closes for tier in tiers] == [1, 1]


async def test_nothing_begins_behind_a_close() -> None:
    """It would move blocks of memory that is given back; what is under way goes on."""
    tier, go, source = FakeTier(), asyncio.Event(), Filled(seed=1)
    store = store_on(tier)
    tier.before = go.wait
    put = store.put(chain(1), source.cache, [0])
    await until(lambda: tier.moving)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    with pytest.raises(ClosedOK):
        store.put(chain(2), source.cache, [0, 1])
    with pytest.raises(ClosedOK):
        await store.flush()
    go.set()
    await closing
    assert (await put).complete


@pytest.mark.parametrize("call", ["delete", "delete_all", "pin", "unpin", "flush"])
async def test_a_close_waits_for_every_call(
    call: str,
) -> None:
    go, begun = asyncio.Event(), asyncio.Event()

    async def wait(*_: object, **__: object) -> object:
        begun.set()
        await go.wait()
        return all_placed(1, BlockState.MISSING)

    calls = ("delete", "delete_namespace", "apply", "flush")
    tier: FakeTier = type("Waits", (FakeTier,), dict.fromkeys(calls, wait))()
    store, cache = store_on(tier), Filled().cache
    arguments = {"flush": (), "delete_all": (cache,)}.get(call, (chain(1), cache))
    calling = asyncio.create_task(getattr(store, call)(*arguments))
    await begun.wait()
    closing = asyncio.create_task(store.close())
    await turns(4)
    closed_meanwhile = tier.closes
    go.set()
    await asyncio.gather(calling, closing)
    assert (closed_meanwhile, tier.closes) == (0, 1)


async def test_a_flush_does_not_wait_for_what_is_put_meanwhile() -> None:
    tier, source = FakeTier(), Filled(seed=1)
    gates = [asyncio.Event(), asyncio.Event()]
    left = iter(gates)
    tier.before = lambda: next(left).wait()
    async with store_on(tier) as store:
        first = store.put(chain(1, "a"), source.cache, [0])
        await until(lambda: len(tier.moving) == 1)
        flushing = asyncio.create_task(store.flush())
        await asyncio.sleep(0)
        second = store.put(chain(1, "b"), source.cache, [0])
        await until(lambda: len(tier.moving) == 2)
        gates[0].set()
        await flushing
        assert first.done()
        assert not second.done()
        gates[1].set()
        await second


async def test_blocks_that_memory_cannot_hold_are_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Filled(4, LARGE, seed=1)
    async with BlockStore.open(["memory:256KiB?slab=16KiB"]) as store:
        for turn in range(3):
            put = await store.put(chain(2, str(turn)), source.cache, [0, 1])
            assert not put.landed
    (line,) = warned(caplog)
    assert "a block of 65536 bytes has no room in a slab of 16384 bytes" in line


@pytest.mark.parametrize("write", ["through", "back"])
async def test_a_flush_is_not_over_while_blocks_are_in_memory_only(write: Any) -> None:
    """What a tier would not take when it was put, a flush brings there."""
    tier, source = FakeTier("below"), Filled(seed=1)
    async with store_on(tier, write=write) as store:
        await store.put(chain(2, "a"), source.cache, [0, 1])
        tier.refusing, tier.error = True, "it is away"
        put = await store.put(chain(3, "b"), source.cache, [2, 3, 4])
        assert put.complete is (write == "back")
        left = 3 if write == "through" else 5
        with pytest.raises(OSError, match=f"^{left} blocks are in .* below: it is aw"):
            await store.flush()
        await store.delete(chain(3, "b")[1:], source.cache)
        with pytest.raises(OSError, match=r"^1 block is|^3 blocks are"):
            await store.flush()
        tier.refusing, tier.error = False, ""
        await store.flush()
        assert len(tier.orders) == 3


async def test_a_put_says_why_also_if_no_tier_does() -> None:
    tier = FakeTier()
    tier.refusing = True
    async with store_on(tier) as store:
        outcome = await store.put(chain(2), Filled(seed=1).cache, [0, 1])
    (reason,) = outcome.missing.reasons
    assert reason == f"it is in memory only: {UNSAID}"


@pytest.mark.parametrize("slow", [0, 1])
async def test_an_open_that_fails_closes_every_tier_that_is_open(
    monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """Also when it is cancelled while one of them takes its time."""
    tiers = [FakeTier("first"), FakeTier("second")]
    tiers[slow].closing = asyncio.Event()
    left = iter(tiers)

    async def open_next(address: TierAddress, _: Tenants) -> Tier:
        for tier in left:
            return tier
        raise UsageError(f"{address.text} cannot be opened")

    monkeypatch.setattr(store_module, "open_tier", open_next)

    async def open_store() -> BlockStore:
        return await BlockStore.open(["memory:64KiB", "a:", "b:", "c:"])

    opening = asyncio.create_task(open_store())
    await until(lambda: tiers[slow].closes)
    opening.cancel()
    event = tiers[slow].closing
    assert event is not None
    event.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert [tier.closes for tier in tiers] == [1, 1]


@pytest.mark.parametrize("kind", ["disk", "kvwire", "server"])
async def test_a_scope_that_cancels_again_leaves_nothing_open(
    kind: str, tmp_path: Path
) -> None:
    """At whichever turn it begins: while the store opens, is used, or closes."""
    tiers = {
        "disk": f"disk:{tmp_path}/disk?size=1MiB",
        "kvwire": "kvwire://127.0.0.1:9",
        "server": f"disk:{tmp_path}/disk?size=1MiB",
    }
    hashes, source = chain(2), Filled(seed=1)

    async def use() -> None:
        async with BlockStore.open([*MEMORY, tiers[kind]]) as store:
            await store.put(hashes, source.cache, [0, 1])
            if kind == "server":
                async with StoreServer(store, "127.0.0.1:0"):
                    await asyncio.sleep(0)

    before, tasks = open_descriptors(), asyncio.all_tasks()
    cancelled, turns = True, 0
    while cancelled and turns < MANY_TURNS:
        cancelled = await in_scope(turns, use)
        assert asyncio.all_tasks() == tasks
        turns += 1 + turns // 8
    # The next one has the directory, its lock and its descriptors for itself.
    async with BlockStore.open([*MEMORY, tiers[kind]]) as store:
        await store.put(hashes, source.cache, [0, 1])
        assert await store.match(hashes) == 2
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ([], "a list"),
        ("memory:8GiB", "a list"),
        (["memory"], "memory:8GiB"),
        (["disk:a?size=1GiB"], "begin with memory:SIZE"),
        (["memory:8 parsecs"], "8GiB"),
        (["memory:900TiB"], "this machine cannot"),
        (["memory:1GiB?slap=4"], "unknown option 'slap'"),
        (["memory:1MiB?populate=1"], "yes or no"),
        (["memory:1GiB", "tape:a"], "unknown kind 'tape'"),
        (["memory:1MiB", "disk:a"], "write disk:DIRECTORY"),
        (["memory:1MiB", "disk:?size=1GiB"], "write disk:DIRECTORY"),
        (["memory:1MiB", "disk:a?size=1GiB&fsync=1"], "unknown option 'fsync'"),
        (["memory:1MiB", "disk:a?size=1GiB&sync=1"], "sync='1': pass flush or put"),
        (["memory:1MiB", "disk:a?size=1GiB&slab=2GiB"], "a slab has 2147483648 bytes"),
        (["memory:1MiB", "disk:a?size=4095"], "4096 to"),
        (["object:tape://b/p"], "tape"),
        (["object:file:somewhere"], "object:file:///DIRECTORY"),
        (["object:memory:///?requests=0"], "requests"),
        (["object:memory:///?timeout=soon"], "timeout"),
        (["object:s3://b/p?regio=x"], "regio"),
        (["object:s3://b/p?allow_http=yes"], "allow_http"),  # obstore panics
        (["object:s3://b/p?secret_access_key=x"], "environment"),
        (["object:s3://b/p?aws_session_token=x"], "environment"),
        (["redis:127.0.0.1:6379"], "HOST:PORT"),
        (["redis://127.0.0.1:port"], "port"),
        (["redis://127.0.0.1:1?size=1GiB"], "unknown option 'size'"),
        (["redis://127.0.0.1:1?codec=zstd-planes"], "takes no codec"),
        (["kvwire://role=store,role=x?directory=file:/tmp"], "'role' appears twice"),
        (["kvwire://role=store?directory=nothing:"], "unknown kind of directory"),
        (["kvwire://role=store?size=1GiB"], "unknown option 'size'"),
        (["kvwire:127.0.0.1:7500"], "kvwire://HOST:PORT"),
        (["kvwire://127.0.0.1"], "no port"),
        (["kvwire://127.0.0.1:1?timeout=0"], "timeout"),
        (["kvwire://127.0.0.1:1?size=1GiB"], "unknown option 'size'"),
        (["kvwire://127.0.0.1:1?psk_file=/nowhere"], "nowhere"),
        (["kvwire://10.0.0.1:1"], "keygen"),
    ],
)
async def test_a_wrong_tier_is_refused(tiers: list[str], said: str) -> None:
    scheme = tiers[0].partition(":")[0] if tiers else ""
    if scheme in MISSING:
        pytest.skip(
            f"{LIBRARIES[scheme]}, or a library that it needs, is not installed"
        )
    with pytest.raises(UsageError, match=said):
        await BlockStore.open(tiers)


async def test_wrong_calls_are_refused() -> None:
    cache: PagedCache = Filled().cache
    async with BlockStore.open(MEMORY) as store:
        with pytest.raises(UsageError, match="3 hashes of group 'kv' cover 12 tokens"):
            store.put(chain(3), cache, [0, 1])
        with pytest.raises(UsageError, match="all must have the same length"):
            store.put([b"a", b"bc"], cache, [0, 1])
        with pytest.raises(UsageError, match="must be bytes"):
            store.get(["a"], cache, [0])  # type: ignore[list-item]


async def test_what_opens_a_store_does_so_once() -> None:
    """Of two, the end of the block would close only the last."""
    opening = BlockStore.open(["memory:1MiB"])
    async with opening as store:
        with pytest.raises(
            UsageError, match=r"BlockStore\.open: it was already opened"
        ):
            await opening
    with pytest.raises(ClosedOK):
        await store.flush()


def test_a_store_that_is_dropped_keeps_neither_lock_nor_memory(tmp_path: Path) -> None:
    """As after an error before its ``close``; its next user can open the directory."""
    tiers = ["memory:1MiB", f"disk:{tmp_path}?size=4MiB"]

    async def use() -> None:
        store = await BlockStore.open(tiers)
        assert (await store.put(chain(2), Filled(seed=1).cache, [0, 1])).complete

    def collected() -> bool:
        gc.collect()
        return open_descriptors() == before

    def forget() -> bool:
        asyncio.run(use())
        # The disk's thread may still hold its last order for a moment.
        return eventually(collected)

    before = open_descriptors()
    for _ in range(2):
        with pytest.warns(ResourceWarning, match=r"was never closed: use `async with`"):
            forgotten = forget()
        assert forgotten


@pytest.mark.parametrize("populate", ["yes", "no"])
async def test_memory_beyond_its_container_is_refused_and_too_much_is_said(
    populate: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit = MemoryLimit(64 << 20, Path("/sys/fs/cgroup/a/memory.max"))
    monkeypatch.setattr("kvwire_store.store.memory_limit", lambda: limit)
    monkeypatch.setattr("kvwire_store.store.resident_bytes", lambda: 60 << 20)
    with pytest.raises(UsageError, match=r"64 MiB .*memory\.max"):
        await BlockStore.open([f"memory:65MiB?populate={populate}"])
    async with BlockStore.open([f"memory:4MiB?populate={populate}"]):
        assert not caplog.messages
    async with BlockStore.open([f"memory:5MiB?populate={populate}"]):
        (message,) = caplog.messages
        assert "less than 4 MiB" in message


@pytest.mark.parametrize("berth_bytes", [1, 511, 512, 4096, 1 << 20, 1 << 28])
@pytest.mark.parametrize("berths", [1, 2])
async def test_sizes_of_berths_are_used(berth_bytes: int, berths: int) -> None:
    source, target = Filled(4, seed=1), Filled(4)
    async with (
        BlockStore.open(["memory:1MiB"]) as store,
        StoreServer(
            store, "127.0.0.1:0", berths=berths, berth_bytes=berth_bytes
        ) as server,
        BlockStore.open(
            ["memory:64KiB", f"kvwire://127.0.0.1:{server.address.port}"]
        ) as client,
    ):
        put = await client.put(chain(4), source.cache, range(4))
        await inside.tiers(client).memory.empty()
        got = await client.get(chain(4), target.cache, range(4))
        assert put.complete == got.complete == (berth_bytes >= 512)
        if not put.complete:
            assert "a block of 512 bytes is more" in str(put.missing.reasons)


async def test_a_tier_without_room_says_what_small_blocks_waste(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, and not before it lacks room."""
    source = Filled(300, seed=1)
    hashes = chain(300)
    async with BlockStore.open(["memory:1MiB"]) as store:
        assert (await store.put(hashes[:200], source.cache, range(200))).complete
        assert not caplog.messages
        for first in (200, 250):
            some = range(first, first + 50)
            await store.put(hashes[some.start : some.stop], source.cache, some)
    (message,) = caplog.messages
    assert "lacks room: blocks of 512 bytes can use 12.5% of it" in message
