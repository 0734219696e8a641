"""What tests of tiers put, and look for in a store."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from kvwire_store import BlockStore
from kvwire_store.keys import as_keys
from kvwire_store.namespace import Namespace
from kvwire_store.tiers.base import Tier
from tests.support import inside
from tests.support.caches import STORED as SPEC
from tests.support.caches import Filled, chain

NAMESPACE = Namespace("kv", SPEC)
BLOCKS = 32
T = TypeVar("T", bound=Tier)


def tier_of(store: BlockStore, kind: type[T]) -> T:
    (tier,) = inside.tiers(store).below
    assert isinstance(tier, kind)
    return tier


def in_memory(store: BlockStore, hashes: list[bytes]) -> list[bool]:
    """Whether the memory of a store with one namespace has each block."""
    (digest,) = inside.tiers(store).namespaces
    keys = as_keys(map(digest.__add__, hashes))
    found: list[bool] = (inside.tiers(store).memory.index.find(keys) >= 0).tolist()
    return found


async def put_before(*tiers: str, count: int = 16) -> tuple[Filled, list[bytes]]:
    """Have a store of before put a chain of blocks; return them and their hashes."""
    source, hashes = Filled(max(16, count), seed=1), chain(count)
    async with BlockStore.open(tiers) as store:
        assert (await store.put(hashes, source.cache, range(count))).complete
    return source, hashes


async def expect_shared(where: str, name: str = "") -> None:
    """What one store puts another one gets, into another layout, until it is gone."""
    hashes, blocks = chain(BLOCKS + 8, name), list(range(BLOCKS))
    source, target = Filled(BLOCKS + 8, seed=1), Filled(BLOCKS + 8, layout="HND")
    memory = "memory:256KiB"
    async with BlockStore.open([memory, where]) as store:
        put = await store.put(hashes[:BLOCKS], source.cache, blocks)
        assert put.complete, put.missing.reasons
    async with BlockStore.open([memory, where]) as store:
        assert await store.match(hashes, target.cache) == BLOCKS
        outcome = await store.get(hashes, target.cache, range(BLOCKS + 8))
        assert outcome.landed.ids().tolist() == blocks
        assert set(outcome.missing.reasons) == {"it is not in the store"}
        assert np.array_equal(source.tokens(blocks), target.tokens(blocks))
        stats = store.stats()[where]
        assert (stats.read_blocks, stats.written_blocks) == (BLOCKS, 0)
        # A delete leaves nothing, also of what was just read.
        await store.delete(hashes[:8], target.cache)
        assert await store.match(hashes[7:], target.cache) == 0
        assert await store.match(hashes[8:], target.cache) == BLOCKS - 8
        await store.delete_all()
        assert await store.match(hashes[8:], target.cache) == 0
    async with BlockStore.open([memory, where]) as store:
        assert await store.match(hashes, target.cache) == 0
        assert await store.match(hashes[8:], target.cache) == 0
