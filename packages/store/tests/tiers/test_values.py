"""Tiers in services of values: what they remember, what is damaged, coming back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire_store.images import images_in, views_of
from kvwire_store.keys import Keys, as_keys
from kvwire_store.limits import STORE_HASH_BYTES_MAX
from kvwire_store.namespace import ABSENT, DIGEST_BYTES, ORDERS, UNKNOWN
from kvwire_store.tiers.base import Batch, BlockResult, BlockResults
from kvwire_store.tiers.object_format import HEAD_BYTES, ObjectHead, path_of
from packages.store.tests.contract import NAMESPACE
from packages.store.tests.tiers.services import Played, Remembering
from tests.support.pairs import until

KEYS = as_keys([NAMESPACE.digest + bytes([at]) * 16 for at in range(4)])


def batch(keys: Keys = KEYS, fill: int = 0) -> Batch:
    memory = np.full(keys.size * NAMESPACE.image_bytes, fill, np.uint8)
    images = images_in(memory, NAMESPACE.image_bytes, keys.size)
    return Batch(keys, np.ones(keys.size, np.uint8), images)


async def test_it_is_asked_again_whatever_its_client_raises() -> None:
    """Clients raise what is no OSError; nobody would ever ask again after that."""
    service = Played()
    tier = await service.open()
    service.raising = [RuntimeError("no cluster"), OSError("refused")]
    try:
        tier.lost(OSError("lost"))
        assert tier.reason == "lost"
        await until(lambda: not tier.reason)
        assert not service.raising
        assert not tier.error
    finally:
        await tier.close()


async def test_what_is_evicted_there_is_asked_for_each_time() -> None:
    tier = await Played().open()
    await tier.write(NAMESPACE, batch())
    assert (await tier.find(KEYS) == 1).all()
    tier.service.values.clear()
    assert (await tier.find(KEYS) == ABSENT).all()
    assert tier.service.asked == [*KEYS, *KEYS]
    await tier.close()


async def test_what_was_put_or_is_absent_is_remembered_until_it_changes() -> None:
    tier = await Played().open(Remembering)
    assert (await tier.find(KEYS) == ABSENT).all()
    assert (await tier.find(KEYS) == ABSENT).all()
    assert tier.service.asked == KEYS.tolist(), "once, for a while"
    await tier.write(NAMESPACE, batch())
    assert (await tier.find(KEYS) == 1).all()
    await tier.delete(KEYS[:1])
    assert (await tier.find(KEYS) == ABSENT).tolist() == [True, False, False, False]
    await tier.delete_namespace(NAMESPACE.digest)
    assert tier.service.asked == KEYS.tolist()
    assert (await tier.find(KEYS) == ABSENT).all()
    await tier.close()


@pytest.mark.parametrize("seed", range(20))
async def test_an_old_answer_never_replaces_what_is_known_by_now(seed: int) -> None:
    """Finds, puts and deletes at once: at the end ``find`` and the service agree."""
    rng, tier = random.Random(seed), await Played().open(Remembering)

    async def put(keys: Keys) -> None:
        await tier.write(NAMESPACE, batch(keys))

    async def read(keys: Keys) -> None:
        await tier.read(NAMESPACE, batch(keys))

    for _ in range(5):
        calls = [rng.choice([put, tier.find, tier.delete, read]) for _ in range(8)]
        await asyncio.gather(
            *(call(KEYS[rng.sample(range(4), 2)]) for call in calls),
        )
        there = [key in tier.service.values for key in KEYS.tolist()]
        assert (await tier.find(KEYS) != ABSENT).tolist() == there
    await tier.close()


async def test_a_block_that_went_and_returned_meanwhile_is_not_absent() -> None:
    class Overtaken(Remembering):
        async def get_into(self, batch: Batch) -> BlockResults:
            await self.delete(batch.keys)
            results = await super().get_into(batch)
            await self.write(NAMESPACE, batch)
            return results

    tier = await Played().open(Overtaken)
    await tier.write(NAMESPACE, batch())
    assert (await tier.read(NAMESPACE, batch()) == BlockResult.MISSING).all()
    assert (await tier.find(KEYS) == 1).all()
    await tier.close()


async def test_every_block_of_a_large_find_is_found() -> None:
    """What one answer changes in the memory outdates no other answer of the call."""
    service = Played()
    keys = as_keys([NAMESPACE.digest + at.to_bytes(16, "big") for at in range(4097)])
    await (await service.open()).write(NAMESPACE, batch(keys))
    tier = await service.open(Remembering)
    assert (await tier.find(keys) == 1).all()
    await tier.close()


def flipped(value: bytes, at: int) -> bytes:
    raw = bytearray(value)
    raw[at] ^= 1
    return bytes(raw)


# What is there in the place of a block's value, beside the value of another block.
DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "empty": lambda *_: b"",
    "half a head": lambda value, _: value[: HEAD_BYTES // 2],
    "only a head": lambda value, _: value[:HEAD_BYTES],
    "cut": lambda value, _: value[:-1],
    "magic": lambda value, _: flipped(value, 0),
    "order": lambda value, _: flipped(value, 9),
    "key": lambda value, _: flipped(value, HEAD_BYTES - 40),
    "sum": lambda value, _: flipped(value, HEAD_BYTES - 1),
    "first byte": lambda value, _: flipped(value, HEAD_BYTES),
    "last byte": lambda value, _: flipped(value, -1),
    "another block": lambda _, other: other,
}
# These show in its head.
NOT_FOUND = {"empty", "half a head", "magic", "order", "key", "sum", "another block"}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_value_that_is_no_block_is_damaged_until_it_is_written_again(
    damage: str,
) -> None:
    """In each service of values: their tiers share what reads a value."""
    service = Played()
    tier = await service.open()
    await tier.write(NAMESPACE, batch(fill=7))
    first, second, *_ = KEYS.tolist()
    values = service.values
    values[first] = DAMAGES[damage](values[first], values[second])
    found = (await tier.find(KEYS) == 1).tolist()
    assert found == [damage not in NOT_FOUND, True, True, True]
    asked = batch()
    results = await tier.read(NAMESPACE, asked)
    assert results.tolist() == [BlockResult.DAMAGED, *[BlockResult.LANDED] * 3]
    assert all((np.array(view) == 7).all() for view in views_of(asked.images)[1:])
    assert set(values) == {*KEYS.tolist()} - {first}
    assert tier.stats().damaged_blocks == 1
    await tier.write(NAMESPACE, batch(fill=7))
    assert (await tier.read(NAMESPACE, batch()) == BlockResult.LANDED).all()
    await tier.close()


async def test_a_service_that_gives_no_heads_leaves_the_order_unknown() -> None:
    tier = await Played(heads=False).open()
    await tier.write(NAMESPACE, batch())
    assert (await tier.find(KEYS) == UNKNOWN).all()
    asked = batch()
    asked.orders.fill(UNKNOWN)
    assert (await tier.read(NAMESPACE, asked) == BlockResult.LANDED).all()
    assert (asked.orders == 1).all()
    await tier.close()


# --- the head of a value -----------------------------------------------------------

heads = st.builds(
    ObjectHead,
    st.binary(min_size=DIGEST_BYTES + 1, max_size=DIGEST_BYTES + STORE_HASH_BYTES_MAX),
    st.integers(0, len(ORDERS) - 1),
    st.integers(1, 2**63),
    st.integers(0, 2**64 - 1),
)


@given(heads, st.binary(max_size=8))
def test_a_head_is_read_as_it_was_written(head: ObjectHead, image: bytes) -> None:
    raw = head.to_bytes()
    assert len(raw) == HEAD_BYTES
    assert ObjectHead.read(memoryview(raw + image)) == head


@given(heads, st.integers(0, HEAD_BYTES * 8 - 1))
def test_no_bit_of_a_head_may_change(head: ObjectHead, bit: int) -> None:
    raw = bytearray(head.to_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    assert ObjectHead.read(memoryview(raw)) is None


@given(st.binary(max_size=2 * HEAD_BYTES))
def test_other_bytes_are_no_head(raw: bytes) -> None:
    assert ObjectHead.read(memoryview(raw)) is None


@given(st.lists(heads, min_size=2, max_size=2, unique_by=lambda head: head.key))
def test_every_key_has_a_name_of_its_own(pair: list[ObjectHead]) -> None:
    assert path_of(pair[0].key) != path_of(pair[1].key)
