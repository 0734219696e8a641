"""A tier at a server of another process: contents, and what is left when one dies."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import kvwire
from kvwire import KVSpec, UsageError
from kvwire.kv.fragments import Fragments, Payload
from kvwire.memory.copy import copy
from kvwire_store import BlockStore, StoreServer
from kvwire_store.keys import Keys, as_keys
from kvwire_store.limits import STORE_KEYS_MAX, STORE_UNASKED_BYTES
from kvwire_store.namespace import DIGEST_BYTES
from kvwire_store.server import messages
from kvwire_store.tiers.base import MISSING
from kvwire_store.tiers.remote import RemoteTier
from packages.store.tests.contract import in_memory, tier_of
from packages.store.tests.files import Faults, disk, store_on
from packages.store.tests.server_child import serving
from tests.support import inside
from tests.support.caches import STORED as SPEC
from tests.support.caches import STORED_LARGE as LARGE
from tests.support.caches import Filled, chain
from tests.support.pairs import turns, until

BLOCKS = 256
# So a batch of a store is sixteen requests, and whoever is killed has some to go.
BERTH = LARGE.block_bytes * BLOCKS // 16
ARGUMENTS = ("--tier", "memory:64MiB", "--berth", f"{BERTH}B")


async def test_a_server_tells_what_it_has_blocks_of() -> None:
    async with serving("--tier", "memory:4MiB") as server:
        async with BlockStore.open([server.where]) as store:
            await store.put(chain(8), Filled(seed=1).cache, range(8))
        async with BlockStore.open([server.where]) as store:
            assert await store.match(chain(8)) == 8


# --- a server that dies ---------------------------------------------------------------

# Longer than a test may take: what ends does not end by its deadline.
PATIENT = "?timeout=600"


async def test_a_hash_that_is_named_twice_and_is_nowhere() -> None:
    """Its second place is asked for as well, after the first one was in vain."""
    async with (
        BlockStore.open(["memory:16MiB"]) as served,
        StoreServer(served, "127.0.0.1:0") as server,
        BlockStore.open(["memory:16MiB", f"kvwire://{server.address}"]) as store,
    ):
        outcome = await store.get(chain(1) * 2, Filled(2).cache, [0, 1])
        assert not outcome.landed
        assert outcome.missing.reasons == ("it is not in the store",)


@pytest.mark.parametrize("spec", [SPEC, LARGE], ids=["small", "large"])
async def test_a_store_without_a_memory_tier_keeps_nothing(spec: KVSpec) -> None:
    """Or it would return bytes that another client has deleted since."""
    before, after = Filled(8, spec, seed=1), Filled(8, spec, seed=2)
    target = Filled(9, spec)
    async with (
        BlockStore.open(["memory:16MiB"]) as served,
        StoreServer(served, "127.0.0.1:0", one_sided_windows="off") as server,
        BlockStore.open([f"kvwire://{server.address}"]) as putting,
        BlockStore.open([f"kvwire://{server.address}"]) as getting,
    ):
        await putting.put(chain(8), before.cache, range(8))
        # The answer lacks a block, so the get goes on behind it.
        await getting.get([*chain(8), *chain(1, "other")], target.cache, range(9))
        await getting.get(chain(8), target.cache, range(8))
        await served.delete(chain(8), before.cache)
        assert not await putting.match(chain(8), before.cache)
        assert not await getting.match(chain(8), before.cache)
        await served.put(chain(8), after.cache, range(8))
        assert (await getting.get(chain(8), target.cache, range(8))).complete
        assert np.array_equal(target.tokens([*range(8)]), after.tokens([*range(8)]))


@pytest.mark.slow
async def test_a_server_killed_in_the_middle_of_a_put() -> None:
    source, hashes = Filled(BLOCKS, LARGE, seed=1), chain(BLOCKS)
    async with (
        serving(*ARGUMENTS) as server,
        BlockStore.open(["memory:64MiB", server.where + PATIENT]) as store,
    ):
        tier = tier_of(store, RemoteTier)
        put = store.put(hashes, source.cache, range(BLOCKS))
        await until(lambda: tier._client.active and tier._client.active._answers)
        server.signal(signal.SIGSTOP)
        assert not put.done()
        server.signal(signal.SIGKILL)
        outcome = await put
        await put.drained()
        assert not outcome.complete
        assert len(outcome.landed) + len(outcome.missing) == BLOCKS
        assert all("it is in memory only" in why for why in outcome.missing.reasons)
        await until(lambda: tier.reason)
        assert not tier.taking
        assert tier.error in store.report[tier.name]
        # What is in memory is still there; what is not, is said to be unknown.
        target = Filled(BLOCKS, LARGE)
        assert (await store.get(hashes, target.cache, range(BLOCKS))).complete
        missed = await store.get(chain(1, "other"), target.cache, [0])
        assert server.where in missed.missing["kv", 0]


async def test_a_server_killed_in_the_middle_of_a_get() -> None:
    source, hashes = Filled(BLOCKS, LARGE, seed=1), chain(BLOCKS)
    target = Filled(BLOCKS, LARGE)
    async with serving(*ARGUMENTS) as server:
        async with BlockStore.open(["memory:64MiB", server.where]) as store:
            assert (await store.put(hashes, source.cache, range(BLOCKS))).complete
        tier = server.where + PATIENT
        async with BlockStore.open(["memory:64MiB", tier]) as store:
            get = store.get(hashes, target.cache, range(BLOCKS))
            await until(lambda: len(inside.tiers(store).memory.in_flight))
            server.signal(signal.SIGSTOP)
            assert not get.done()
            server.signal(signal.SIGKILL)
            outcome = await get
            here = outcome.landed.ids()
            assert len(here) + len(outcome.missing) == BLOCKS
            assert not outcome.complete
            assert all(server.where in why for why in outcome.missing.reasons)
            assert np.array_equal(
                source.tokens(here.tolist()), target.tokens(here.tolist())
            )
            # Nothing is left pinned or taken: all of memory can go.
            memory = inside.tiers(store).memory
            await memory.empty()
            assert not memory.index.slabs.used_bytes


# --- a server that lies ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda find: messages.Found(find.number, b""), "0 orders of 2"),
        (
            lambda find: messages.StoreDone(find.number, b"\0\0"),
            "does not match the request",
        ),
        (lambda _: messages.Welcome(1), "sent a second welcome"),
        (lambda find: [2, find.number, b"\xfd\xfd"], "not a reply"),
        (lambda _: b"\xc1", "not a reply"),
        (lambda _: None, "no answer within 0.5 s"),
    ],
    ids=["too few", "another kind", "hello again", "out of range", "noise", "silence"],
)
async def test_a_server_that_answers_wrongly(answer: Any, said: str) -> None:
    """It is not believed, and not asked again on that connection."""

    async def lie(connection: kvwire.Connection) -> None:
        find = messages.decode_request(await connection.recv(messages.TAG))
        assert isinstance(find, messages.Find)
        if (reply := answer(find)) is not None:
            body = reply if isinstance(reply, bytes) else msgspec.msgpack.encode(reply)
            await connection.send(messages.TAG, body)

    welcome = messages.Welcome(1, requests=4, berth_bytes=4096)
    timeout_s = 0.5 if "0.5 s" in said else 60
    async with lying(welcome, lie, timeout_s) as where, BlockStore.open([where]) as s:
        assert await s.match(chain(2), Filled().cache) == 0
        assert said in tier_of(s, RemoteTier).error
        await until(lambda: not tier_of(s, RemoteTier).taking)


async def test_a_request_is_late_by_its_own_deadline() -> None:
    """Whether or not an earlier one may take longer, as a verb may."""
    welcome = messages.Welcome(1, requests=4, berth_bytes=4096)
    async with lying(welcome) as where, BlockStore.open([where]) as store:
        pin = asyncio.create_task(store.pin(chain(1), Filled().cache))
        await asyncio.sleep(0)
        assert await store.match(chain(1), Filled().cache) == 0
        assert "no answer within 0.5 s" in tier_of(store, RemoteTier).error
        (why,) = (await pin).reasons
        assert "no answer within 0.5 s" in why


async def silent(_: kvwire.Connection) -> None:
    """Says no more than its welcome."""


@asynccontextmanager
async def lying(
    welcome: messages.Welcome,
    lie: Callable[[kvwire.Connection], Awaitable[None]] = silent,
    timeout_s: float = 0.5,
) -> AsyncIterator[str]:
    """Where one client is welcomed, and then lied to until it goes."""
    async with kvwire.open() as liar:
        address = await liar.listen("127.0.0.1:0")

        async def serve() -> None:
            connection = await liar.accept()
            assert isinstance(
                messages.decode_request(await connection.recv(messages.TAG)),
                messages.StoreHello,
            )
            await connection.send(messages.TAG, messages.encode(welcome))
            await lie(connection)
            await connection.wait_closed()

        serving = asyncio.create_task(serve())
        yield f"kvwire://{address.host}:{address.port}?timeout={timeout_s}"
        await serving


@pytest.mark.parametrize(
    ("spec", "orders", "blocks", "said"),
    [
        (SPEC, bytes(5), 4, "2048 bytes of 5 blocks"),
        (SPEC, bytes(5), 6, "3072 bytes of 5 blocks"),
        (LARGE, bytes(5), 4, "262144 bytes of 5 blocks"),
        (LARGE, bytes(5), 6, "waits for a larger buffer"),
        (SPEC, bytes(4), 5, "4 orders of 5 blocks"),
        (SPEC, b"\xff\0\0\0\0", 5, "5 orders of 5 blocks"),
        (LARGE, b"\xfe\0\0\0\0", 5, "5 orders of 5 blocks"),
    ],
)
async def test_a_server_that_sends_other_blocks_than_it_says(
    spec: KVSpec, orders: bytes, blocks: int, said: str
) -> None:
    """None of them is believed, and nothing is left of them."""
    images = bytes(blocks * spec.block_bytes)

    async def lie(connection: kvwire.Connection) -> None:
        asked = messages.decode_request(await connection.recv(messages.TAG))
        assert isinstance(asked, messages.Get)
        inline = memoryview(images if spec is SPEC else b"")
        done = messages.StoreDone(asked.number, bytes(5), "", orders, inline)
        await connection.send(messages.TAG, messages.encode(done))
        if spec is LARGE:
            with suppress(kvwire.KVWireError):
                await connection.send(messages.payload_tag(asked.number), images)

    welcome = messages.Welcome(1, berth_bytes=BERTH)
    async with lying(welcome, lie, 60) as where, BlockStore.open([where]) as s:
        outcome = await s.get(chain(5), Filled(8, spec).cache, range(3, 8))
        assert not outcome.landed
        assert said in outcome.missing["kv", 7]
        assert not len(inside.tiers(s).memory.index)
        assert not inside.tiers(s).memory.index.slabs.used_bytes


async def test_a_server_of_a_later_major_version_is_refused_by_name() -> None:
    async with lying(messages.Welcome(2)) as where:
        said = "the store server speaks .* 2 to 2, this side 1 to 1; upgrade the older"
        with pytest.raises(UsageError, match=said):
            await BlockStore.open([where])


# --- gets without a task --------------------------------------------------------------


def same(one: Filled, here: list[int], other: Filled, there: list[int]) -> bool:
    return np.array_equal(one.tokens(here), other.tokens(there))


@pytest.fixture
def by_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory is mapped."""
    monkeypatch.setenv("KVWIRE_REQUIRE", "tcp")


@asynccontextmanager
async def asking(*memory: str) -> AsyncIterator[tuple[BlockStore, BlockStore]]:
    """A store that is served by TCP, and one that gets from it."""
    async with (
        BlockStore.open(["memory:16MiB"]) as served,
        StoreServer(served, "127.0.0.1:0") as server,
        BlockStore.open([*memory, f"kvwire://{server.address}"]) as store,
    ):
        yield served, store


async def memory_has_its_copies(store: BlockStore) -> None:
    """They come behind the caller, those of several gets together."""
    await until(lambda: not len(inside.tiers(store).memory.in_flight))


@pytest.mark.parametrize("memory", [("memory:16MiB",), ("memory:16MiB?keep=no",), ()])
async def test_a_small_get_needs_no_task(by_tcp: None, memory: tuple[str, ...]) -> None:
    """What a memory tier keeps is not asked for again."""
    source = Filled(8, seed=1)
    async with asking(*memory) as (served, store):
        assert (await served.put(chain(8), source.cache, range(8))).complete
        for asked in (3, 6):
            target = Filled(8)
            tasks = asyncio.all_tasks()
            get = store.get(chain(8)[1:4], target.cache, [5, 0, 2])
            assert asyncio.all_tasks() == tasks
            outcome = await get
            assert outcome.complete
            assert get.is_drained
            assert same(target, [5, 0, 2], source, [1, 2, 3])
            kept = memory == ("memory:16MiB",)
            read = tier_of(store, RemoteTier).stats().read_blocks
            assert read == (3 if kept else asked)
        assert served.counters.hit_blocks == (3 if kept else 6)
        assert store.counters.hit_blocks == 6
        assert not len(inside.tiers(store).memory.in_flight)
        assert inside.tiers(store).memory.index.pinned == 0


async def test_a_small_get_of_images_in_two_orders(by_tcp: None) -> None:
    """Each lands in the layout of the cache that gets it."""
    first, second = Filled(4, layout="HND", seed=1), Filled(4, seed=2)
    async with asking() as (served, store):
        assert (await served.put(chain(2), first.cache, [0, 1])).complete
        assert (await served.put(chain(4)[2:], second.cache, [2, 3])).complete
        target = Filled(4)
        assert (await store.get(chain(4), target.cache, range(4))).complete
        again = Filled(4, layout="HND")
        assert (await store.get(chain(4), again.cache, range(4))).complete
        for got in (target, again):
            assert same(got, [0, 1], first, [0, 1])
            assert same(got, [2, 3], second, [2, 3])


@pytest.mark.parametrize(("count", "module"), [(3, "asked"), (4, "get")])
async def test_an_answer_that_finds_no_memory_is_asked_for_again(
    by_tcp: None, monkeypatch: pytest.MonkeyPatch, count: int, module: str
) -> None:
    """The get ends, and so does the close, which waits for it."""
    source, target = Filled(8, LARGE, seed=1), Filled(8, LARGE)

    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise MemoryError

    async with asking("memory:16MiB") as (served, store):
        assert (await served.put(chain(3), source.cache, range(3))).complete
        monkeypatch.setattr(f"kvwire_store.operations.{module}.copy", fail)
        async with asyncio.timeout(60):
            outcome = await store.get(chain(count), target.cache, range(count))
        assert outcome.landed.ids().tolist() == [0, 1, 2]
        assert same(target, [0, 1, 2], source, [0, 1, 2])
        assert tier_of(store, RemoteTier).connected
        assert not len(inside.tiers(store).memory.in_flight)
        assert inside.tiers(store).memory.index.pinned == 0


async def test_a_small_get_that_several_tasks_await(by_tcp: None) -> None:
    """One that stops waiting takes no outcome from the others."""
    source, target = Filled(8, seed=1), Filled(8)
    async with asking() as (served, store):
        assert (await served.put(chain(3), source.cache, range(3))).complete
        get = store.get(chain(3), target.cache, range(3))

        async def wait() -> bool:
            return (await get).complete

        waits = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waits[1].cancel()
        ends = await asyncio.gather(*waits, return_exceptions=True)
        assert [ends[0], type(ends[1]), ends[2]] == [True, asyncio.CancelledError, True]
        assert await wait()
        assert same(target, [0, 1, 2], source, [0, 1, 2])


async def test_an_answer_that_cannot_be_handled_costs_one_connection(
    by_tcp: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = Filled(8, seed=1), Filled(8)

    def fail(_: object) -> None:
        monkeypatch.undo()
        raise MemoryError

    async with asking() as (served, store):
        assert (await served.put(chain(1), source.cache, [0])).complete
        monkeypatch.setattr("kvwire_store.server.client.decode_reply", fail)
        outcome = await store.get(chain(1), target.cache, [0])
        assert "could not be handled here" in outcome.missing["kv", 0]
        assert "MemoryError" in caplog.text
        await until(lambda: tier_of(store, RemoteTier).connected)
        assert (await store.get(chain(1), target.cache, [0])).complete


async def test_a_small_get_finds_no_memory_for_a_request(
    by_tcp: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Filled(8, LARGE, seed=1), Filled(8, LARGE)

    def fail(_: object) -> bytes:
        monkeypatch.undo()
        raise MemoryError

    async with asking("memory:16MiB") as (served, store):
        assert (await served.put(chain(3), source.cache, range(3))).complete
        monkeypatch.setattr("kvwire_store.server.client.encode", fail)
        get = store.get(chain(3), target.cache, range(3))
        assert (await get).complete
        assert get.is_drained
        assert same(target, [0, 1, 2], source, [0, 1, 2])
        await turns(20)
        assert not len(inside.tiers(store).memory.in_flight)
        assert inside.tiers(store).memory.index.pinned == 0


async def test_blocks_that_memory_cannot_copy_leave_no_slot_taken(
    by_tcp: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller has them already."""
    source, target = Filled(8, seed=1), Filled(8)

    def fail(images: Payload, room: Payload) -> None:
        if isinstance(room, Fragments):
            raise MemoryError
        copy(images, room)  # the server's own

    async with asking("memory:16MiB") as (served, store):
        assert (await served.put(chain(3), source.cache, range(3))).complete
        monkeypatch.setattr("kvwire_store.tiers.memory.copy", fail)
        assert (await store.get(chain(3), target.cache, range(3))).complete
        assert same(target, [0, 1, 2], source, [0, 1, 2])
        memory = inside.tiers(store).memory
        await memory_has_its_copies(store)
        assert "could not be kept in memory" in caplog.text
        assert not memory.index.slabs.used_bytes


async def test_gets_in_a_row_reach_memory_together(by_tcp: None) -> None:
    """The last one is used last; a call that needs one of them does not wait."""
    source, target = Filled(8, seed=1), Filled(8)
    async with asking("memory:16MiB") as (served, store):
        assert (await served.put(chain(8), source.cache, range(8))).complete
        memory = inside.tiers(store).memory
        for at in range(4):
            outcome = await store.get(chain(8)[at : at + 1], target.cache, [at])
            assert outcome.complete
        await memory_has_its_copies(store)
        assert in_memory(store, chain(8)) == [True] * 4 + [False] * 4
        next_out = memory.index.victims(outcome.nbytes, 4)
        assert [key[DIGEST_BYTES:] for key in next_out.keys.tolist()] == chain(4)
        memory.unpin(next_out.slots[::-1])
        assert (await store.get(chain(8)[4:6], target.cache, [4, 5])).complete
        assert (await store.get(chain(8)[5:7], target.cache, [5, 6])).complete
        assert same(target, [*range(7)], source, [*range(7)])
        assert tier_of(store, RemoteTier).stats().read_blocks == 7


async def test_a_get_of_a_block_that_another_get_has_asked_for_ends_with_it(
    by_tcp: None,
) -> None:
    """Memory gets this block at once, since a call waits for it."""
    source, first, second = Filled(8, seed=1), Filled(8), Filled(8)
    async with asking("memory:16MiB") as (served, store):
        assert (await served.put(chain(1), source.cache, [0])).complete
        get = store.get(chain(1), first.cache, [0])
        again = store.get(chain(1), second.cache, [3])
        assert (await get).complete
        await turns(20)
        assert again.done()
        assert (await again).complete
        assert same(second, [3], source, [0])
        assert tier_of(store, RemoteTier).stats().read_blocks == 1


async def test_a_delete_waits_for_no_other_gets_to_reach_memory(by_tcp: None) -> None:
    source, target = Filled(8, seed=1), Filled(8)
    async with asking("memory:16MiB") as (served, store):
        assert (await served.put(chain(1), source.cache, [0])).complete
        assert (await store.get(chain(1), target.cache, [0])).complete
        memory = inside.tiers(store).memory
        delete = asyncio.create_task(memory.delete(as_keys(memory.in_flight.ends)))
        await turns(20)
        assert delete.done()
        assert in_memory(store, chain(1)) == [False]


@pytest.mark.parametrize("count", [2, 4, 5])
@pytest.mark.parametrize("memory", [("memory:16MiB",), ()])
async def test_a_get_of_several_blocks(
    by_tcp: None, memory: tuple[str, ...], count: int
) -> None:
    """One block of it is nowhere; more of them than an answer holds come after it."""
    source, target = Filled(8, LARGE, seed=1), Filled(8, LARGE)
    there = [number for number in range(count) if number != 1]
    async with asking(*memory) as (served, store):
        put = await served.put([chain(8)[at] for at in there], source.cache, there)
        assert put.complete
        for _ in range(2):
            get = store.get(chain(count), target.cache, range(count))
            outcome = await get
            assert get.is_drained
            assert outcome.landed.ids().tolist() == there
            assert outcome.missing.reasons == ("it is not in the store",)
            assert same(target, there, source, there)
        await memory_has_its_copies(store)
        tiers = inside.tiers(store)
        assert in_memory(store, chain(2)) == [bool(memory), False]
        assert store.counters.missed_blocks == 2
        assert not len(tiers.memory.in_flight)
        assert tiers.memory.index.pinned == 0


async def test_a_small_get_of_more_blocks_than_a_request_names(by_tcp: None) -> None:
    """Their bytes fit one answer; their keys do not fit one request."""
    spec = KVSpec(layers=1, kv_heads=1, head_dim=8, block_tokens=1, dtype="uint8")
    count = STORE_KEYS_MAX + 1
    source, target = Filled(count, spec, seed=1), Filled(count, spec)
    async with asking() as (served, store):
        await served.put(chain(count), source.cache, range(count))
        outcome = await store.get(chain(count), target.cache, range(count))
        # The served memory has room for no more.
        here = outcome.landed.ids().tolist()
        assert here == [*range(STORE_KEYS_MAX)]
        assert same(target, here, source, here)


@pytest.mark.parametrize(("count", "spec"), [(64, LARGE), (256, SPEC)])
async def test_more_gets_than_a_client_may_request_at_once(
    by_tcp: None, count: int, spec: KVSpec
) -> None:
    """Those that are beyond its requests go the long way."""
    source, target = Filled(count, spec, seed=1), Filled(count, spec)
    async with asking() as (served, store):
        assert (await served.put(chain(count), source.cache, range(count))).complete
        gets = [
            store.get([name], target.cache, [number])
            for number, name in enumerate(chain(count))
        ]
        assert all([(await get).complete for get in gets])
        assert same(target, [*range(count)], source, [*range(count)])


async def test_a_delete_during_a_small_get_leaves_nothing_behind(by_tcp: None) -> None:
    """It waits for the blocks, which would come back after it otherwise."""
    source, target = Filled(8, seed=1), Filled(8)
    async with asking("memory:16MiB") as (served, store):
        for _ in range(20):
            assert (await served.put(chain(4), source.cache, range(4))).complete
            get = store.get(chain(4), target.cache, range(4))
            await store.delete(chain(4), target.cache)
            await get
            assert in_memory(store, chain(4)) == [False] * 4
            assert in_memory(served, chain(4)) == [False] * 4


async def test_a_small_get_finds_no_room_in_memory(by_tcp: None) -> None:
    """The caller has the blocks; memory does not, while all of it is in use."""
    source, target = Filled(8, LARGE, seed=1), Filled(8, LARGE)
    async with asking("memory:64KiB") as (served, store):
        assert (await served.put(chain(3), source.cache, range(3))).complete
        assert (await store.get(chain(1), target.cache, [0])).complete
        await memory_has_its_copies(store)
        memory = inside.tiers(store).memory
        here = memory.index.named()
        memory.index.pin(here.slots)
        assert (await store.get(chain(2)[1:], target.cache, [1])).complete
        await memory_has_its_copies(store)
        assert in_memory(store, chain(2)) == [True, False]
        memory.unpin(here.slots)
        assert (await store.get(chain(3)[2:], target.cache, [2])).complete
        await memory_has_its_copies(store)
        assert in_memory(store, chain(3)) == [False, False, True]
        assert same(target, [0, 1, 2], source, [0, 1, 2])


async def test_an_answer_that_comes_too_late_touches_nothing(by_tcp: None) -> None:
    """The get has ended, and its blocks are the caller's again."""
    target = Filled(8)
    release = asyncio.Event()

    async def answer_late(connection: kvwire.Connection) -> None:
        asked = messages.decode_request(await connection.recv(messages.TAG))
        assert isinstance(asked, messages.Get)
        await release.wait()
        images = memoryview(b"x" * 512)
        done = messages.StoreDone(asked.number, bytes(1), "", bytes(1), images)
        with suppress(kvwire.KVWireError):
            await connection.send(messages.TAG, messages.encode(done))

    welcome = messages.Welcome(1, berth_bytes=BERTH, requests=4)
    async with lying(welcome, answer_late) as where, BlockStore.open([where]) as store:
        get = store.get(chain(1), target.cache, [3])
        outcome = await get
        assert get.is_drained
        assert "no answer within 0.5 s" in outcome.missing["kv", 3]
        release.set()
        await turns(20)
        assert not any(tensor.any() for tensor in target.tensors)


async def test_no_more_requests_are_open_than_a_server_allows(by_tcp: None) -> None:
    """Also while it takes none: those that wait to be sent count as open."""
    spec = KVSpec(layers=1, kv_heads=1, head_dim=8, block_tokens=1, dtype="uint8")
    count, target = 1000, Filled(1000, spec)
    # The open requests at each moment.
    seen: list[int] = []

    async def answer_in_pauses(connection: kvwire.Connection) -> None:
        asked: list[messages.Get] = []
        while True:
            try:
                raw = await connection.recv(messages.TAG, deadline=0.05)
            except kvwire.DeadlineExceeded:
                for get in asked:
                    done = messages.StoreDone(get.number, bytes([MISSING]) * count)
                    await connection.send(messages.TAG, messages.encode(done))
                asked.clear()
            except kvwire.KVWireError:
                return
            else:
                request = messages.decode_request(raw)
                if isinstance(request, messages.Get):
                    asked.append(request)
                    seen.append(len(asked))

    welcome = messages.Welcome(1, requests=4, berths=4, berth_bytes=1 << 20)
    async with (
        lying(welcome, answer_in_pauses) as where,
        BlockStore.open([where]) as store,
    ):
        gets = [
            store.get(chain(count, str(number)), target.cache, range(count))
            for number in range(60)
        ]
        for get in gets:
            assert not (await get).landed
    assert 1 <= max(seen) <= 4


# More than is put without a question.
COUNT = 1 + STORE_UNASKED_BYTES // LARGE.block_bytes


async def test_blocks_that_a_server_has_in_memory_only_are_put_again(
    tmp_path: Path,
) -> None:
    """Or one that its disk could not take is acknowledged to the next who puts it."""
    faults = Faults()
    source = Filled(64, LARGE, seed=1)
    hashes = chain(COUNT)
    below = await disk(tmp_path, "16MiB", faults)
    async with (
        store_on(below, memory="memory:16MiB") as stored,
        StoreServer(stored, "127.0.0.1:0") as server,
        BlockStore.open(["memory:16MiB", f"kvwire://{server.address}"]) as one,
        BlockStore.open(["memory:16MiB", f"kvwire://{server.address}"]) as other,
    ):
        faults.full()
        outcome = await one.put(hashes, source.cache, range(COUNT))
        assert len(outcome.missing) == COUNT
        faults.failing.clear()
        assert in_memory(stored, hashes) == [True] * COUNT
        assert await other.match(hashes, source.cache) == COUNT
        assert (await other.put(hashes, source.cache, range(COUNT))).complete
        assert (await below.holds(keys_of(stored, hashes))).all()
        # What is there is not sent again.
        faults.calls.clear()
        assert (await one.put(hashes, source.cache, range(COUNT))).complete
        assert "pwritev" not in faults.calls


@pytest.mark.parametrize("count", [1, COUNT])
async def test_what_was_read_from_a_servers_memory_alone_is_written_back(
    count: int, tmp_path: Path
) -> None:
    """Or a block that its disk could not take is lost when the server dies."""
    faults = Faults()
    spec = SPEC if count == 1 else LARGE
    source = Filled(64, spec, seed=1)
    hashes = chain(count)
    below = await disk(tmp_path, "16MiB", faults)
    async with (
        store_on(below, memory="memory:16MiB") as stored,
        StoreServer(stored, "127.0.0.1:0") as server,
        BlockStore.open(["memory:16MiB", f"kvwire://{server.address}"]) as one,
    ):
        faults.full()
        outcome = await one.put(hashes, source.cache, range(count))
        assert len(outcome.missing) == count
        faults.failing.clear()
        tiers = ["memory:16MiB", f"kvwire://{server.address}"]
        for _ in range(2):
            async with BlockStore.open(tiers, write="back") as other:
                into = Filled(64, spec).cache
                assert (await other.get(hashes, into, range(count))).complete
            # Its memory has evicted them.
            assert (await below.holds(keys_of(stored, hashes))).all()
            written = stored.stats()[below.name].written_blocks
            assert written == count  # and once is enough


@pytest.mark.parametrize("count", [1, COUNT])
async def test_what_a_servers_disk_has_evicted_is_written_back(
    count: int, tmp_path: Path
) -> None:
    """Or a block that its memory alone still has is lost when the server dies."""
    spec = SPEC if count == 1 else LARGE
    source = Filled(64, spec, seed=1)
    hashes = chain(count)
    below = await disk(tmp_path, "16MiB", Faults())
    async with (
        store_on(below, memory="memory:16MiB") as stored,
        StoreServer(stored, "127.0.0.1:0") as server,
    ):
        tiers = ["memory:16MiB", f"kvwire://{server.address}"]
        async with BlockStore.open(tiers) as one:
            assert (await one.put(hashes, source.cache, range(count))).complete
        keys = keys_of(stored, hashes)
        await below.delete(keys)
        async with BlockStore.open(tiers, write="back") as other:
            into = Filled(64, spec).cache
            assert (await other.get(hashes, into, range(count))).complete
        # Its memory has evicted them.
        assert (await below.holds(keys)).all()


def keys_of(store: BlockStore, hashes: list[bytes]) -> Keys:
    (digest,) = inside.tiers(store).namespaces
    return as_keys(map(digest.__add__, hashes))
