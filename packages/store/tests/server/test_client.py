"""A line to a store server; what it does for its tier is in test_remote."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import kvwire
from kvwire import ConnectionLost
from kvwire_store import BlockStore, StoreServer
from kvwire_store.keys import Keys, Orders
from kvwire_store.limits import STORE_REQUESTS_MAX
from kvwire_store.server.client import ActiveConnection, StoreClient
from kvwire_store.server.messages import VERSIONS, Flush, StoreDone, Welcome
from packages.store.tests.fakes import FakeTier
from packages.store.tests.files import store_on
from tests.support import inside
from tests.support.caches import STORED_LARGE as LARGE
from tests.support.caches import Filled, chain
from tests.support.pairs import connected, turns, until


async def test_what_is_asked_while_it_is_down_fails_at_once() -> None:
    async with kvwire.open() as communicator:
        line = StoreClient(communicator, "127.0.0.1:9", 1.0, lambda: None)
        with pytest.raises(ConnectionLost, match="has not been dialled yet"):
            line.now()
        await line.open()
        with pytest.raises(ConnectionLost, match="Connection refused"):
            line.now()
        await line.close()
        await line.close()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_request_that_is_not_sent_leaves_no_error_behind(
    cancelled: bool,
) -> None:
    """The send fails with the connection, and nobody waits for the answer any more."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, what: reported.append(what)
    )
    async with connected("tcp", eager_bytes=0) as pair:
        active = ActiveConnection(pair.left, Welcome(VERSIONS[1]), 5.0)
        asking = asyncio.create_task(active.call(Flush(1), StoreDone))
        await asyncio.sleep(0)
        if cancelled:
            asking.cancel()
            await asyncio.wait((asking,))
        active.end("no answer within 5 s", lost=True)
        if not cancelled:
            with pytest.raises(ConnectionLost, match="no answer within 5 s"):
                await asking
        del asking
        gc.collect()
        await asyncio.sleep(0)
    assert not reported


async def test_nothing_is_sent_behind_the_end_of_listening() -> None:
    """Such as a call that waited for its turn: no answer would come."""
    async with connected("tcp") as pair:
        active = ActiveConnection(pair.left, Welcome(VERSIONS[1]), 600.0)
        listening = asyncio.create_task(active.listen())
        await turns(4)
        listening.cancel()
        await asyncio.wait((listening,))
        assert not active.post(Flush(1), lambda _: None)
        with pytest.raises(ConnectionLost, match="the client was closed"):
            async with asyncio.timeout(30):
                await active.call(Flush(2), StoreDone)


class Slow(FakeTier):
    """Looks for blocks once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def find(self, keys: Keys) -> Orders:
        await self.go.wait()
        return await super().find(keys)


@asynccontextmanager
async def slowly_served() -> AsyncIterator[tuple[Slow, StoreServer, BlockStore]]:
    tier = Slow()
    async with (
        store_on(tier) as served,
        StoreServer(served, "127.0.0.1:0", one_sided_windows="off") as server,
        BlockStore.open([f"kvwire://127.0.0.1:{server.address.port}"]) as client,
    ):
        yield tier, server, client


async def test_a_call_that_is_cancelled_keeps_its_turn_until_it_is_answered() -> None:
    """Or one more follows it, and the server drops a client that has too many."""
    cache = Filled(1, LARGE).cache
    async with slowly_served() as (tier, server, client):
        for _ in range(2 * STORE_REQUESTS_MAX):
            looking = asyncio.create_task(client.match(chain(1), cache))
            await turns(4)
            looking.cancel()
            await asyncio.wait((looking,))
        last = asyncio.create_task(client.match(chain(1), cache))
        await until(lambda: server.dropped or server.clients()[0].requests > 1)
        tier.go.set()
        assert await last == 0
        assert not server.dropped


async def test_more_gets_than_a_client_may_have_open_wait_for_their_turn() -> None:
    """Half of them are posted, the others are calls; a server drops a greedy client."""
    count = 2 * STORE_REQUESTS_MAX
    cache = Filled(count, seed=1).cache
    async with slowly_served() as (tier, server, client):
        gets = [client.get([one], cache, [at]) for at, one in enumerate(chain(count))]
        await until(
            lambda: (
                server.dropped
                or server.clients()[0].requests >= STORE_REQUESTS_MAX // 2
            )
        )
        await turns(20)
        tier.go.set()
        for get in gets:
            assert (await get).missing.reasons == ("it is not in the store",)
        assert not server.dropped


async def test_a_listener_whose_loop_is_dropped_touches_nothing() -> None:
    """Python closes its coroutine then; a connection refuses calls without its loop."""
    async with connected("tcp") as pair:
        active = ActiveConnection(pair.left, Welcome(VERSIONS[1]), 5.0)
        listening = active.listen()
        listening.send(None)
        listening.close()
        assert not pair.left.closed
        pair.left.abort()


async def test_a_client_that_closes_is_no_lost_connection() -> None:
    """Nor a failed lane or a fallback: alerts fire at these."""
    source = Filled(8, LARGE, seed=1)
    async with (
        BlockStore.open(["memory:8MiB"]) as store,
        StoreServer(store, "127.0.0.1:0") as server,
    ):
        for number in range(3):
            async with BlockStore.open(
                ["memory:64KiB", f"kvwire://127.0.0.1:{server.address.port}"]
            ) as client:
                put = await client.put(chain(8, str(number)), source.cache, range(8))
                assert put.complete
                await inside.tiers(client).memory.empty()
                got = await client.get(chain(8, str(number)), source.cache, range(8))
                assert got.complete
        await until(lambda: not server.clients())
        counts = server.communicator.counters
        assert counts.connections_lost == 0
        assert counts.lanes_failed == 0
        assert counts.transport_fallbacks == 0
