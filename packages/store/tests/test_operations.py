"""Requests: where an image has its elements, and what one that ends lets go of."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.kv.fragments import Fragments
from kvwire.kv.spec import KVSpec
from kvwire.memory.copy import copy
from kvwire_store.namespace import ORDERS, Namespace, namespace_of, order_of
from kvwire_store.operations.group_request import GroupRequest
from kvwire_store.request import StoreRequest
from kvwire_store.store import BlockStore
from kvwire_store.tiers.base import Batch, BlockResults
from packages.store.tests.fakes import FakeTier
from packages.store.tests.files import store_on
from tests.kv.reference import Element, Store, shapes
from tests.support import inside
from tests.support.caches import STORED as SPEC
from tests.support.caches import Filled, chain
from tests.support.depth import examples
from tests.support.pairs import until

SIZES = [(1, 1), (4, 4), (2, 4), (4, 2), (6, 4), (4, 6), (1, 3), (3, 1)]
"""Tokens of a block, and of a hash."""


def image_bytes(request: GroupRequest, positions: list[int], order: int) -> bytes:
    """The images, copied out of the cache."""
    fragments = request.fragments(np.array(positions), order)
    gathered = bytearray(fragments.nbytes)
    copy(fragments, memoryview(gathered))
    return bytes(gathered)


def slow_image(store: Store, ids: Sequence[int], tokens: range, order: int) -> bytes:
    steps = {
        "layer": store.spec.layer_indices,
        "kv": range(store.spec.components),
        "token": tokens,
        "head": store.spec.heads,
        "dim": range(store.spec.head_dim),
    }
    parts = []
    for at in itertools.product(*(steps[axis] for axis in ORDERS[order])):
        named = dict(zip(ORDERS[order], at, strict=True))
        raw, index = store.place(ids, Element(**named))
        parts.append(raw[index].tobytes())
    return b"".join(parts)


@given(st.data())
@settings(max_examples=examples(120), deadline=None, derandomize=True)
def test_an_image_has_every_element_in_its_place(data: st.DataObject) -> None:
    """Any layout, block size and order; and back into another layout."""
    block_tokens, hash_tokens = data.draw(st.sampled_from(SIZES))
    fields = {
        "layers": data.draw(st.integers(1, 3)),
        "kv_heads": data.draw(st.sampled_from([1, 2])),
        "head_dim": data.draw(st.integers(1, 3)),
        "components": data.draw(st.sampled_from([1, 2])),
        "dtype": data.draw(st.sampled_from(["float16", "float32", "uint8"])),
    }
    spec = KVSpec(**fields, block_tokens=block_tokens)  # type: ignore[arg-type]
    units = np.lcm(block_tokens, hash_tokens) * 2 // hash_tokens
    blocks = int(units) * hash_tokens // block_tokens
    ids = data.draw(st.permutations(range(blocks + 1)))[:blocks]
    source = Store(spec, blocks + 1, data.draw(shapes(spec)))
    source.fill(ids)
    cache = source.cache()
    group = cache.groups["kv"]
    hashes = chain(int(units))
    namespace = namespace_of(group, hash_tokens)
    request = GroupRequest(cache, "kv", np.array(ids), hashes, namespace)
    order = data.draw(st.integers(0, len(ORDERS) - 1))
    some = sorted(data.draw(st.sets(st.integers(0, int(units) - 1), min_size=1)))

    expected = b"".join(
        slow_image(source, ids, range(p * hash_tokens, (p + 1) * hash_tokens), order)
        for p in some
    )
    images = image_bytes(request, some, order)
    assert images == expected
    assert 0 <= order_of(group.order) < len(ORDERS)

    target = Store(spec, blocks + 1, data.draw(shapes(spec)))
    there = GroupRequest(target.cache(), "kv", np.array(ids), hashes, namespace)
    into = there.fragments(np.array(some), order)
    assert isinstance(into, Fragments)
    copy(memoryview(images), into)
    assert image_bytes(there, some, order) == expected


# --- how requests end -----------------------------------------------------------------


NAMESPACE = Namespace("kv", SPEC)
COUNT = 6


class Broken(FakeTier):
    """Raises where a tier answers, and waits before it if a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.asked = 0
        self.orders = {NAMESPACE.digest + one: 0 for one in chain(COUNT, "there")}

    async def read(self, namespace: Namespace, batch: Batch) -> BlockResults:
        self.asked += 1
        await self.go.wait()
        raise ValueError("a bug")

    async def write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        return await self.read(namespace, batch)


def nothing_held(store: BlockStore) -> bool:
    """No pin, no slot without a name, no fill that goes on."""
    memory = inside.tiers(store).memory
    named = len(memory.index) * 4096
    return (
        not memory.index.pinned
        and not len(memory.in_flight)
        and memory.stats().used_bytes == named
    )


async def begun(store: BlockStore, verb: Literal["put", "get"]) -> StoreRequest:
    """A request whose blocks the tier below is asked for, or given."""
    (tier,) = inside.tiers(store).below
    assert isinstance(tier, Broken)
    call, name = (store.put, "new") if verb == "put" else (store.get, "there")
    request = call(chain(COUNT, name), Filled(COUNT, seed=1).cache, range(COUNT))
    await until(lambda: tier.asked)
    return request


@pytest.mark.parametrize("verb", ["put", "get"])
async def test_a_bug_of_a_tier_ends_one_request_and_holds_nothing(
    verb: Literal["put", "get"],
) -> None:
    tier = Broken()
    store = store_on(tier)
    request = await begun(store, verb)
    # A put has copied its blocks by then; a get may still write to its own.
    assert request.is_drained == (verb == "put")
    tier.go.set()
    with pytest.raises(ValueError, match="a bug"):
        await request
    assert request.is_drained
    assert nothing_held(store)
    del request  # its error has the images
    # And the store goes on with what does not need this tier.
    outcome = await store.get(chain(2, "nowhere"), Filled(2).cache, [0, 1])
    assert len(outcome.missing) == 2
    tier.refusing = True
    await store.close()


@pytest.mark.parametrize("verb", ["put", "get"])
async def test_a_request_that_is_torn_down_holds_nothing(
    verb: Literal["put", "get"],
) -> None:
    """As at the end of ``asyncio.run``, which cancels every task."""
    tier = Broken()
    store = store_on(tier)
    request = await begun(store, verb)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert request.is_drained
    assert request.outcome is None
    assert nothing_held(store)
    del request
    tier.refusing = True
    await store.close()
