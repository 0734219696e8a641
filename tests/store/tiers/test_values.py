"""What tiers in services of values have in common: what they remember, and coming back."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from kvwire.kv.blocks import Bits
from kvwire.store.address import TierAddress
from kvwire.store.images import images_in
from kvwire.store.index import Key, Keys, as_keys
from kvwire.store.namespace import ABSENT, UNKNOWN
from kvwire.store.tiers.base import Batch, BlockResult, BlockResults
from kvwire.store.tiers.object_format import HEAD_BYTES, packed
from kvwire.store.tiers.values import Head, KeyValueTier
from tests.store.caches import SPEC
from tests.store.contract import NAMESPACE
from tests.support.pairs import until

KEYS = as_keys([NAMESPACE.digest + bytes([at]) * 16 for at in range(4)])


class Service(KeyValueTier):
    """Keeps values in a dictionary; counts what it is asked for."""

    def __init__(self, address: TierAddress) -> None:
        super().__init__(address)
        self.values: dict[Key, bytes] = {}
        self.asked: list[Key] = []
        self.raising: list[Exception] = []

    async def is_back(self) -> bool:
        if self.raising:
            raise self.raising.pop(0)
        return True

    async def heads(self, keys: Keys) -> list[Head]:
        self.asked += keys.tolist()
        await asyncio.sleep(0)
        found = (self.values.get(key) for key in keys.tolist())
        return [
            BlockResult.MISSING if value is None else value[:HEAD_BYTES]
            for value in found
        ]

    async def put(self, batch: Batch) -> BlockResults:
        for key, value in zip(batch.keys.tolist(), packed(batch), strict=True):
            self.values[key] = value.tobytes()
        return np.full(batch.keys.size, BlockResult.LANDED, np.uint8)

    async def get_into(self, batch: Batch) -> BlockResults:
        results = np.full(batch.keys.size, BlockResult.MISSING, np.uint8)
        there = [at for at, k in enumerate(batch.keys.tolist()) if k in self.values]
        raws = [memoryview(self.values[batch.keys[at]]) for at in there]
        await self.unpack(batch, np.array(there, np.int64), raws, results)
        return results

    async def remove(self, keys: Keys) -> Bits:
        for key in keys.tolist():
            self.values.pop(key, None)
        return np.ones(keys.size, np.bool_)

    async def remove_folder(self, folder: str) -> None:
        for key in [k for k in self.values if self.value_name(k).startswith(folder)]:
            del self.values[key]


class Remembering(Service):
    remembers = True


def batch(keys: Keys = KEYS, fill: int = 0) -> Batch:
    memory = np.full(keys.size * SPEC.block_bytes, fill, np.uint8)
    images = images_in(memory, SPEC.block_bytes, keys.size)
    return Batch(keys, np.ones(keys.size, np.uint8), images)


async def test_it_is_asked_again_whatever_its_client_raises() -> None:
    """Clients raise what is no OSError; nobody would ever ask again after that."""
    tier = await Service.open(TierAddress.parse("service:"))
    tier.raising = [RuntimeError("no cluster"), OSError("refused")]
    try:
        tier.lost(OSError("lost"))
        assert tier.reason == "lost"
        await until(lambda: not tier.reason)
        assert not tier.raising
        assert not tier.error
    finally:
        await tier.close()


async def test_what_is_evicted_there_is_asked_for_each_time() -> None:
    tier = await Service.open(TierAddress.parse("service:"))
    await tier.write(NAMESPACE, batch())
    assert (await tier.find(KEYS) == 1).all()
    tier.values.clear()
    assert (await tier.find(KEYS) == ABSENT).all()
    assert tier.asked == [*KEYS, *KEYS]
    await tier.close()


async def test_what_was_put_or_is_absent_is_remembered_until_it_changes() -> None:
    tier = await Remembering.open(TierAddress.parse("service:"))
    assert (await tier.find(KEYS) == ABSENT).all()
    assert (await tier.find(KEYS) == ABSENT).all()
    assert tier.asked == KEYS.tolist(), "once, for a while"
    await tier.write(NAMESPACE, batch())
    assert (await tier.find(KEYS) == 1).all()
    await tier.delete(KEYS[:1])
    assert (await tier.find(KEYS) == ABSENT).tolist() == [True, False, False, False]
    await tier.delete_namespace(NAMESPACE.digest)
    assert (await tier.find(KEYS) == ABSENT).all()
    assert tier.asked == KEYS.tolist()
    await tier.close()


@pytest.mark.parametrize("seed", range(20))
async def test_an_old_answer_never_replaces_what_is_known_by_now(seed: int) -> None:
    """Finds, puts and deletes at once: at the end ``find`` and the service agree."""
    rng, tier = random.Random(seed), await Remembering.open(TierAddress.parse("s:"))

    async def put(keys: Keys) -> None:
        await tier.write(NAMESPACE, batch(keys))

    async def read(keys: Keys) -> None:
        await tier.read(NAMESPACE, batch(keys))

    for _ in range(5):
        calls = [rng.choice([put, tier.find, tier.delete, read]) for _ in range(8)]
        await asyncio.gather(
            *(call(KEYS[rng.sample(range(4), 2)]) for call in calls),
        )
        there = [key in tier.values for key in KEYS.tolist()]
        assert (await tier.find(KEYS) != ABSENT).tolist() == there
    await tier.close()


async def test_a_value_that_is_no_block_is_damaged_and_goes() -> None:
    tier = await Service.open(TierAddress.parse("service:"))
    await tier.write(NAMESPACE, batch())
    first, second, third, _ = KEYS.tolist()
    tier.values[first] = tier.values[second]
    tier.values[third] = tier.values[third][:-1]
    results = await tier.read(NAMESPACE, batch(fill=7))
    assert results.tolist() == [
        *(BlockResult.DAMAGED, BlockResult.LANDED),
        *(BlockResult.DAMAGED, BlockResult.LANDED),
    ]
    assert set(tier.values) == {KEYS[1], KEYS[3]}
    assert tier.stats().damaged_blocks == 2
    await tier.close()


async def test_a_service_that_gives_no_heads_leaves_the_order_unknown() -> None:
    class Headless(Service):
        async def heads(self, keys: Keys) -> list[Head]:
            return [BlockResult.LANDED] * keys.size

    tier = await Headless.open(TierAddress.parse("service:"))
    await tier.write(NAMESPACE, batch())
    assert (await tier.find(KEYS) == UNKNOWN).all()
    asked = batch()
    asked.orders.fill(UNKNOWN)
    assert (await tier.read(NAMESPACE, asked) == BlockResult.LANDED).all()
    assert (asked.orders == 1).all()
    await tier.close()
