"""Blocks in a real Redis or Valkey; test_node_loss.py has clusters."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("redis", reason="redis is not installed: pip install redis")

from redis import Redis

from kvwire import BlockStore, UsageError
from kvwire.store.namespace import Namespace
from kvwire.store.tiers.object_format import HEAD_BYTES, path_of
from kvwire.store.tiers.redis import RedisTier
from tests.store.caches import SPEC, Filled, chain
from tests.support.pairs import until
from tests.support.servers import free_port, redis_server

BLOCKS = 32
EVERY = list(range(BLOCKS))


def tier_of(store: BlockStore) -> RedisTier:
    """The tier below memory."""
    (tier,) = store._tiers.below
    assert isinstance(tier, RedisTier)
    return tier


async def test_what_one_store_puts_another_one_gets() -> None:
    source, target, hashes = (
        Filled(BLOCKS, seed=1),
        Filled(BLOCKS, layout="HND"),
        chain(40),
    )
    with redis_server() as server, Redis("127.0.0.1", server.port) as plain:
        where = f"valkey://127.0.0.1:{server.port}/0?prefix=a&ttl=600"
        async with BlockStore.open(["memory:1MiB", where]) as store:
            assert (await store.put(hashes[:32], source.cache, EVERY)).complete
        first = f"a/{path_of(Namespace('kv', SPEC).digest + hashes[0])}"
        assert 590_000 < plain.pttl(first) <= 600_000
        assert len(plain.keys()) == BLOCKS
        async with BlockStore.open([where]) as store:
            assert await store.match(hashes, target.cache) == BLOCKS
            outcome = await store.get(hashes[:32], target.cache, EVERY)
            assert outcome.complete
            assert np.array_equal(source.tokens(EVERY), target.tokens(EVERY))
            # Another prefix is another store.
            async with BlockStore.open([where.replace("=a", "=b")]) as other:
                assert await other.match(hashes, target.cache) == 0
            # A delete leaves nothing.
            await store.delete(hashes[:8], target.cache)
            assert len(plain.keys()) == BLOCKS - 8
            await store.delete_all()
            assert plain.keys() == []


@pytest.mark.parametrize("at", [0, HEAD_BYTES, -1, None])
async def test_a_wrong_value_is_missing_until_it_is_put_again(at: int | None) -> None:
    source, target, hashes = Filled(seed=1), Filled(), chain(2)
    with redis_server() as server, Redis("127.0.0.1", server.port) as plain:
        where = f"redis://127.0.0.1:{server.port}"
        name, other = (
            f"kvwire/{path_of(Namespace('kv', SPEC).digest + one)}" for one in hashes
        )
        async with BlockStore.open([where]) as store:
            await store.put(hashes, source.cache, [0, 1])
            raw = bytearray(plain.get(name))
            if at is None:
                raw = bytearray(plain.get(other))
            else:
                raw[at] ^= 1
            plain.set(name, bytes(raw))
            await store._tiers.memory.empty()
            outcome = await store.get(hashes, target.cache, [2, 3])
            assert outcome.landed.ids().tolist() == [3]
            assert (await store.put(hashes, source.cache, [0, 1])).complete
            await store._tiers.memory.empty()
            assert (await store.get(hashes, target.cache, [2, 3])).complete
        assert np.array_equal(source.tokens([0, 1]), target.tokens([2, 3]))


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
            await store._tiers.memory.empty()
            outcome = await store.get(hashes, source.cache, range(4))
            assert all(where in why for why in outcome.missing.reasons)
            server.start()
            await until(lambda: not tier_of(store).unavailable_reason)
            assert (await store.put(hashes, source.cache, range(4))).complete


async def test_a_server_that_comes_later() -> None:
    source = Filled(seed=1)
    with redis_server() as server:
        server.kill()
        where = f"redis://u:secret@127.0.0.1:{free_port()},127.0.0.1:{server.port}"
        async with BlockStore.open([where.replace("u:secret@", "")]) as store:
            assert "127.0.0.1" in tier_of(store).error
            assert not (await store.put(chain(1), source.cache, [0])).complete
            server.start()
            await until(lambda: tier_of(store).taking)
            assert (await store.put(chain(2), source.cache, [0, 1])).complete
        with pytest.raises(UsageError, match="invalid username") as refused:
            await BlockStore.open([where])
        assert "secret" not in str(refused.value)
