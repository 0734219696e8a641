"""A server of this host is read in place: it is not asked, and no wrong block lands."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

import kvwire
from kvwire import UsageError
from kvwire.memory.generations import Generations
from kvwire_store import BlockStore, StoreServer
from kvwire_store.host_blocks import HostBlocks
from kvwire_store.server.client import ask_report
from kvwire_store.shared_index import SharedIndex, words_for
from kvwire_store.tiers.remote import RemoteTier
from kvwire_store.tiers.slabs import stride_of
from packages.store.tests.contract import tier_of
from packages.store.tests.server_child import ServerProcess, serving
from tests.support import inside
from tests.support.caches import STORED as SPEC
from tests.support.caches import Filled, StampedCache, chain
from tests.support.depth import examples
from tests.support.pairs import until
from tests.support.runs import Beside, beside

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux maps memory of another process"
)
SMALL = "memory:64KiB"


@pytest.fixture(autouse=True)
def _lanes_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVWIRE_PREFER", "local,tcp")


@asynccontextmanager
async def reading(where: str, front: str = SMALL) -> AsyncIterator[BlockStore]:
    """A client that has mapped its server's memory."""
    async with BlockStore.open([front, where]) as store:
        tier = tier_of(store, RemoteTier)
        await until(lambda: tier.mapped is not None)
        yield store


async def put(
    where: str, hashes: list[bytes], source: Filled, front: str = SMALL
) -> None:
    async with BlockStore.open([front, where]) as store:
        outcome = await store.put(hashes, source.cache, range(len(hashes)))
        assert outcome.complete


# --- nobody is asked ------------------------------------------------------------------


async def test_a_stopped_server_is_matched_and_read() -> None:
    source = Filled(seed=1)
    hashes = chain(16)
    async with serving("--tier", "memory:1MiB") as server:
        await put(server.where, hashes, source)
        async with reading(server.where) as store:
            server.signal(signal.SIGSTOP)
            target = Filled(layout="HND")
            assert await store.match(hashes, target.cache) == 16
            assert await store.match(chain(3, "other"), target.cache) == 0
            assert await store.present(hashes[7:9], target.cache) == [True, True]
            assert (await store.get(hashes[:1], target.cache, [0])).complete
            assert (await store.get(hashes[1:], target.cache, range(1, 16))).complete
            ids = list(range(16))
            assert np.array_equal(target.tokens(ids), source.tokens(ids))
            server.signal(signal.SIGCONT)
            # It learns of these reads later, by itself.
            await until_read(server, 16)


@pytest.mark.parametrize("size", ["64KiB", "1MiB", "1GiB", "3GiB", "4097MiB"])
async def test_a_memory_of_any_size_is_read_in_place(size: str) -> None:
    """A whole GiB has ten digits, and its reader's connection ended."""
    source, target = Filled(seed=1), Filled()
    hashes = chain(4)
    async with (
        BlockStore.open([f"memory:{size}"]) as store,
        StoreServer(store, "127.0.0.1:0") as server,
    ):
        async with reading(f"kvwire://{server.address}") as client:
            assert (await store.put(hashes, source.cache, range(4))).complete
            assert (await client.get(hashes, target.cache, range(4))).complete
            assert tier_of(client, RemoteTier).stats().read_blocks == 4
        assert server.dropped == 0
    assert np.array_equal(target.tokens([*range(4)]), source.tokens([*range(4)]))


async def until_read(server: ServerProcess, blocks: int) -> None:
    """Wait until a server counts so many blocks as read from its memory."""
    while True:
        where = server.where.removeprefix("kvwire://")
        report = await ask_report(where, kvwire.Config.load(None))
        if report.tiers[0].stats.read_blocks >= blocks:
            return


async def test_larger_blocks_are_copied_by_threads() -> None:
    spec = kvwire.KVSpec(
        layers=4, kv_heads=4, head_dim=64, block_tokens=16, dtype="float16"
    )
    source = Filled(64, spec, seed=1)
    target = Filled(64, spec)
    hashes = chain(64)
    async with serving("--tier", "memory:16MiB") as server:
        await put(server.where, hashes, source, "memory:1MiB")
        async with reading(server.where, "memory:1MiB") as store:
            server.signal(signal.SIGSTOP)
            assert (await store.get(hashes, target.cache, range(64))).complete
            server.signal(signal.SIGCONT)
    assert np.array_equal(target.tokens([*range(64)]), source.tokens([*range(64)]))


async def test_what_the_server_has_is_not_sent_to_it() -> None:
    """A put looks into the index as well, so a stopped server keeps nobody waiting."""
    async with serving("--tier", "memory:1MiB") as server:
        await put(server.where, chain(16), Filled(seed=1))
        async with reading(server.where) as store:
            server.signal(signal.SIGSTOP)
            outcome = await store.put(chain(16), Filled(seed=1).cache, range(16))
            server.signal(signal.SIGCONT)
            assert outcome.complete
            assert store.counters.present_blocks == 16


# --- blocks that go -------------------------------------------------------------------


async def test_what_is_deleted_is_not_found_and_may_come_again() -> None:
    target = Filled()
    async with (
        BlockStore.open(["memory:1MiB"]) as served,
        StoreServer(served, "127.0.0.1:0") as server,
        reading(f"kvwire://{server.address}") as store,
    ):
        for seed in (1, 2):
            source = Filled(seed=seed)
            assert (await served.put(chain(8), source.cache, range(8))).complete
            assert await store.match(chain(8), target.cache) == 8
            assert (await store.get(chain(8), target.cache, range(8))).complete
            ids = list(range(8))
            assert np.array_equal(target.tokens(ids), source.tokens(ids))
            await served.delete(chain(8)[:3], source.cache)
            assert await store.match(chain(8), target.cache) == 0
            assert await store.match(chain(8)[3:], target.cache) == 5
            await served.delete(chain(8), source.cache)
            assert await store.match(chain(8), target.cache) == 0
            outcome = await store.get(chain(8), target.cache, range(8))
            assert outcome.missing.reasons == ("it is not in the store",)


async def test_blocks_below_memory_come_from_the_server(tmp_path: Path) -> None:
    tiers = ("memory:64KiB?slab=16KiB", f"disk:{tmp_path}?size=1MiB")
    source = Filled(64, seed=1)
    target = Filled(64)
    async with serving("--tier", tiers[0], "--tier", tiers[1]) as server:
        await put(server.where, chain(64), source)
        async with reading(server.where) as store:
            assert await store.match(chain(64), target.cache) == 64
            assert await store.match(chain(65), target.cache) == 64
            assert (await store.get(chain(64), target.cache, range(64))).complete
    assert np.array_equal(target.tokens([*range(64)]), source.tokens([*range(64)]))


async def test_what_is_read_in_place_is_not_evicted_next() -> None:
    """The server learns of uses, and evicts other blocks."""
    async with (
        BlockStore.open(["memory:64KiB?slab=64KiB"]) as served,
        StoreServer(served, "127.0.0.1:0") as server,
        reading(f"kvwire://{server.address}") as store,
    ):
        cache = Filled(16, seed=1).cache
        assert (await served.put(chain(16), cache, range(16))).complete
        last = chain(16)[-4:]  # the first that would go
        target = Filled()
        assert (await store.get(last, target.cache, range(4))).complete
        memory = inside.tiers(served).memory
        await until(lambda: memory.counts.read_blocks == 4)
        (client,) = server.clients()
        assert client.read_bytes == 4 * SPEC.block_bytes
        assert (await served.put(chain(8, "new"), cache, range(8))).complete
        assert await served.match(last, cache) == 4
        assert await store.match(last, cache) == 4


# --- content names its hash -----------------------------------------------------------


WRITER = """
import asyncio, sys
import kvwire
import kvwire_store
from tests.support.caches import STORED, StampedCache

async def main(where, count):
    named = StampedCache(STORED, 8)
    async with kvwire_store.BlockStore.open(["memory:64KiB", where]) as store:
        number = 0
        while True:
            names = [b"%d" % ((number + i) % count) * 3 for i in range(8)]
            names = [name.rjust(20, b"0") for name in names]
            for block, name in enumerate(names):
                named.write(block, int(name))
            await store.put(names, named.cache, range(8))
            if number % count == 0:
                print(number, flush=True)
            number += 8

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def names_of(count: int) -> list[bytes]:
    """The names that the writer uses."""
    return [(b"%d" % number * 3).rjust(20, b"0") for number in range(count)]


async def test_readers_beside_evictions_get_no_wrong_block() -> None:
    """A server with room for a third of the blocks, which are put again and again."""
    count = 96
    names = names_of(count)
    rng = np.random.default_rng()
    landed = missing = 0
    async with (
        serving("--tier", "memory:128KiB?slab=64KiB") as server,
        beside("-c", WRITER, server.where, str(count), kind=Beside) as writer,
        reading(server.where) as store,
    ):
        await writer.line()
        target = StampedCache(SPEC, 8)
        for _ in range(examples(400)):
            some = rng.choice(count, int(rng.integers(1, 9)), replace=False).tolist()
            ids = range(len(some))
            wanted = [names[number] for number in some]
            outcome = await store.get(wanted, target.cache, ids)
            for block in ids:
                if block in outcome.landed.ids().tolist():
                    assert not target.wrong(block, int(wanted[block]))
                    landed += 1
                else:
                    missing += 1
        assert writer.running
        assert tier_of(store, RemoteTier).mapped is not None
    assert landed
    assert missing


# --- ends -----------------------------------------------------------------------------


async def test_a_killed_server_is_missed_and_found_again() -> None:
    target = Filled()
    async with serving("--tier", "memory:1MiB") as server:
        await put(server.where, chain(8), Filled(seed=1))
        async with reading(server.where) as store:
            tier = tier_of(store, RemoteTier)
            server.signal(signal.SIGKILL)
            await until(lambda: tier.reason)
            assert tier.mapped is None
            outcome = await store.get(chain(8), target.cache, range(8))
            assert len(outcome.missing) == 8
            assert "not searched" in outcome.missing.reasons[0]
            async with serving("--tier", "memory:1MiB", port=server.port) as again:
                await put(again.where, chain(4), Filled(seed=2))
                await until(lambda: tier.mapped is not None)
                assert await store.match(chain(8), target.cache) == 4
                assert (await store.get(chain(4), target.cache, range(4))).complete


READER = """
import asyncio, sys
import kvwire
import kvwire_store
from packages.store.tests.server.test_host_windows import names_of, reading
from tests.support.caches import STORED, StampedCache

async def main(where):
    target = StampedCache(STORED, 8)
    async with reading(where) as store:
        while True:
            await store.get(names_of(8), target.cache, range(8))
            print("read", flush=True)
            await asyncio.sleep(0)

asyncio.run(main(sys.argv[1]))
"""


async def test_a_killed_reader_holds_nothing() -> None:
    """Its blocks are evicted as if it had never been there."""
    async with (
        BlockStore.open(["memory:64KiB?slab=64KiB"]) as served,
        StoreServer(served, "127.0.0.1:0") as server,
    ):
        cache = Filled(16, seed=1).cache
        await served.put(names_of(16), cache, range(16))
        where = f"kvwire://{server.address}"
        async with beside("-c", READER, where, kind=Beside) as reader:
            await reader.line()
            reader.signal(signal.SIGKILL)
            await reader.wait()
        await until(lambda: not server.clients())
        assert (await served.put(chain(16), cache, range(16))).complete
        assert await served.match(chain(16), cache) == 16
        assert await served.match(names_of(16), cache) == 0


# --- an index that lies ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("slab", "images", "words", "slots"),
    [
        (0, 65536, words_for(16), 16),
        (4097, 65536, words_for(16), 16),
        (131072, 65536, words_for(16), 16),
        (65536, 65536, words_for(16) + 192, 16),
        (65536, 65536, words_for(16), 15),
    ],
)
def test_tables_that_do_not_fit_each_other(
    slab: int, images: int, words: int, slots: int
) -> None:
    with pytest.raises(UsageError, match="do not fit together: 65536 bytes in slabs"):
        HostBlocks(
            np.zeros(images, np.uint8),
            np.zeros(words, np.uint64),
            np.zeros(slots, np.uint64),
            slab,
            alone=True,
        )


def test_an_image_that_would_end_behind_its_slab_is_not_found() -> None:
    """As if the writer's slots were smaller than the blocks that are looked for."""
    assert stride_of(65536) == 16
    generations = Generations(16)
    try:
        words = np.zeros(words_for(16), np.uint64)
        writer = SharedIndex(words, generations)
        blocks = HostBlocks(
            np.zeros(65536, np.uint8), words, generations.values, 65536, alone=True
        )
        keys = np.array(chain(2), np.object_)
        writer.add(keys, np.array([0, 3]), np.zeros(2, np.uint8))
        assert blocks.find(keys, 4096).slots.tolist() == [0, 3]
        assert blocks.find(keys, 20000).slots.tolist() == [0, -1]
        assert blocks.find(keys[1:], 20000).slots.tolist() == [-1]
        assert blocks.find(keys, 65537).slots.tolist() == [-1, -1]
    finally:
        del writer, blocks
        generations.close()


# --- who may --------------------------------------------------------------------------


async def test_a_server_may_forbid_it() -> None:
    async with (
        BlockStore.open(["memory:128KiB"]) as served,
        StoreServer(served, "127.0.0.1:0", one_sided_windows="off") as server,
        BlockStore.open([SMALL, f"kvwire://{server.address}"]) as store,
    ):
        cache = Filled(seed=1).cache
        assert (await store.put(chain(4), cache, range(4))).complete
        assert tier_of(store, RemoteTier).mapped is None
        assert inside.tiers(served).memory.index.shared is None


async def test_two_servers_of_one_store() -> None:
    async with (
        BlockStore.open(["memory:128KiB"]) as served,
        StoreServer(served, "127.0.0.1:0") as one,
        StoreServer(served, "127.0.0.1:0") as two,
        reading(f"kvwire://{one.address}") as first,
        reading(f"kvwire://{two.address}") as second,
    ):
        cache = Filled(seed=1).cache
        assert (await first.put(chain(4), cache, range(4))).complete
        target = Filled()
        assert (await second.get(chain(4), target.cache, range(4))).complete
