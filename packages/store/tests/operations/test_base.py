"""What a put and a get have in common: an end in any case, with nothing held."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from kvwire_store.namespace import Namespace
from kvwire_store.request import StoreRequest
from kvwire_store.store import BlockStore
from kvwire_store.tiers.base import Batch, BlockResults
from packages.store.tests.fakes import FakeTier
from packages.store.tests.files import store_on
from tests.support import inside
from tests.support.caches import STORED as SPEC
from tests.support.caches import Filled, chain
from tests.support.pairs import until

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
    request._task.cancel()
    await asyncio.wait((request._task,))
    assert request.is_drained
    assert request.outcome is None
    assert nothing_held(store)
    del request
    tier.refusing = True
    await store.close()
