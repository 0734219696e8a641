"""Blocks in a real Redis or Valkey; test_node_loss.py has clusters."""

from __future__ import annotations

import asyncio

import pytest

from tests.support import inside

pytest.importorskip("redis", reason="redis is not installed: pip install redis")

from redis import Redis

from kvwire import UsageError
from kvwire_store import BlockStore
from kvwire_store.tiers.object_format import path_of
from kvwire_store.tiers.redis import RedisTier
from packages.store.tests.contract import NAMESPACE, tier_of
from tests.support.caches import Filled, chain
from tests.support.pairs import until
from tests.support.servers import free_port, redis_server


def name_of(one: bytes, prefix: str = "kvwire") -> str:
    return f"{prefix}:{path_of(NAMESPACE.digest + one)}"


async def test_values_have_a_prefix_and_an_end() -> None:
    with redis_server() as server, Redis("127.0.0.1", server.port) as plain:
        where = f"valkey://127.0.0.1:{server.port}/0?prefix=a&ttl=600"
        async with BlockStore.open([where]) as store:
            assert (await store.put(chain(2), Filled(seed=1).cache, [0, 1])).complete
        assert 590_000 < plain.pttl(name_of(chain(1)[0], "a")) <= 600_000
        assert len(plain.keys()) == 2
        # Another prefix is another store.
        async with BlockStore.open([where.replace("=a", "=b")]) as other:
            assert await other.match(chain(2), Filled().cache) == 0


async def test_a_server_that_is_full_or_gone() -> None:
    source, hashes = Filled(seed=1), chain(4)
    with redis_server() as server:
        where = f"redis://127.0.0.1:{server.port}?timeout=5"
        with Redis("127.0.0.1", server.port) as plain:
            plain.config_set("maxmemory", "1")
        async with BlockStore.open([where]) as store:
            outcome = await store.put(hashes, source.cache, range(4))
            assert not outcome.complete
            assert all("maxmemory" in why for why in outcome.missing.reasons)
            assert await store.match(hashes, source.cache) == 4
            server.kill()
            await inside.tiers(store).memory.empty()
            outcome = await store.get(hashes, source.cache, range(4))
            assert all(where in why for why in outcome.missing.reasons)
            server.start()
            await until(lambda: not tier_of(store, RedisTier).reason)
            assert (await store.put(hashes, source.cache, range(4))).complete


async def test_a_server_that_comes_later() -> None:
    source = Filled(seed=1)
    with redis_server() as server:
        server.kill()
        where = f"redis://u:secret@127.0.0.1:{free_port()},127.0.0.1:{server.port}"
        async with BlockStore.open([where.replace("u:secret@", "")]) as store:
            assert "127.0.0.1" in tier_of(store, RedisTier).error
            assert not (await store.put(chain(1), source.cache, [0])).complete
            server.start()
            await until(lambda: tier_of(store, RedisTier).taking)
            assert (await store.put(chain(2), source.cache, [0, 1])).complete
        with pytest.raises(UsageError, match="invalid username") as refused:
            await BlockStore.open([where])
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("answer", [b"$-1\r\n", b"*1\r\n:1\r\n", b":5\r\n"])
async def test_a_server_that_answers_what_redis_never_does(answer: bytes) -> None:
    """The outcome and the flush give that as the reason."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while count := await reader.readline():
            words = []
            for _ in range(int(count[1:])):
                nbytes = int((await reader.readline())[1:])
                words.append((await reader.readexactly(nbytes + 2))[:-2])
            writer.write(answer if words[0] == b"SET" else b"+OK\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    where = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    why = "its answer to SET is none that Redis gives"
    async with server, BlockStore.open([where]) as store:
        outcome = await store.put(chain(1), Filled(seed=1).cache, [0])
        assert [why in reason for reason in outcome.missing.reasons] == [True]
        with pytest.raises(OSError, match=why):
            await store.flush()
