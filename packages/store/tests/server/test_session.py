"""One client of a store server: what it asks at once, and what changes meanwhile."""

from __future__ import annotations

import numpy as np
import pytest

import kvwire
from kvwire import UsageError
from kvwire_store import BlockStore, StoreServer
from kvwire_store.limits import STORE_REQUESTS_MAX
from kvwire_store.server import messages
from packages.store.tests.server.test_server import (
    APART,
    MANY,
    client,
    moving,
    names,
    serving,
    where,
)
from tests.support import inside
from tests.support.caches import STORED as SPEC
from tests.support.caches import STORED_LARGE as LARGE
from tests.support.caches import Filled, chain
from tests.support.pairs import until


async def test_small_blocks_that_come_while_a_get_waits_are_in_its_answer() -> None:
    """How they come is told by what was asked, and not by where the server has them."""
    images = np.arange(2 * SPEC.block_bytes).astype(np.uint8).tobytes()
    async with (
        serving("memory:4MiB", berths=1) as (_, server),
        client(server) as one,
        client(server) as other,
    ):
        await one.say(moving(messages.Put, chain(MANY), APART, number=1))
        await until(lambda: inside.served(server).lent_bytes > 0)
        await one.say(moving(messages.Get, chain(2), number=2))
        await until(lambda: any(row.requests == 2 for row in server.clients()))
        await other.ask(moving(messages.Put, chain(2), images=images))
        sent = bytes(MANY * LARGE.block_bytes)
        await one.connection.send(messages.payload_tag(1), sent)
        await one.connection.recv(messages.TAG)
        done = messages.decode_reply(await one.connection.recv(messages.TAG))
        assert isinstance(done, messages.StoreDone)
        assert done.number == 2
        assert done.images == images


async def test_a_get_that_is_answered_is_open_no_more() -> None:
    """While its blocks are on their way the client may ask as much as ever."""
    async with serving("memory:4MiB") as (store, server):
        await store.put(chain(MANY), Filled(MANY, LARGE, seed=1).cache, range(MANY))
        async with client(server) as one:
            await one.ask(moving(messages.Get, chain(MANY), APART, number=1))
            asked = range(2, STORE_REQUESTS_MAX + 2)
            for number in asked:
                await one.say(messages.Find(number, names(chain(1))))
            for _ in asked:
                await one.connection.recv(messages.TAG)
            images = await one.connection.recv(messages.payload_tag(1))
            assert len(images) == MANY * LARGE.block_bytes
        assert not server.dropped


async def test_a_store_that_is_closed_first_closes_its_server() -> None:
    """What clients still ask for would be looked for in memory that is given back."""
    async with serving() as (store, server), client(server) as one:
        await store.put(chain(2), Filled(seed=1).cache, [0, 1])
        await store.close()
        await server.closed()
        with pytest.raises(kvwire.ConnectionClosed):
            await one.ask(moving(messages.Get, chain(2)))
        with pytest.raises(UsageError, match="the store is closed"):
            await StoreServer(store, "127.0.0.1:0").__aenter__()


async def test_kinds_of_blocks_that_nobody_has_are_not_remembered() -> None:
    """By neither side: a client may ask for any number of them."""
    other = Filled(spec=LARGE)
    async with (
        serving() as (store, server),
        BlockStore.open([where(server)]) as near,
    ):
        await near.put(chain(2), Filled(seed=1).cache, [0, 1])
        outcome = await near.get(chain(2, "other"), other.cache, [0, 1])
        assert not outcome.landed.ids().size
        assert await near.match(chain(2)) == 2
        assert (
            len(inside.tiers(near).namespaces)
            == len(inside.tiers(store).namespaces)
            == 1
        )
