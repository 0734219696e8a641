"""A line to a store server; what it does for its tier is in test_remote."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

import kvwire
from kvwire import ConnectionLost
from kvwire_store import BlockStore, StoreServer
from kvwire_store.server.client import ActiveConnection, StoreClient
from kvwire_store.server.messages import VERSIONS, Flush, StoreDone, Welcome
from tests.support import inside
from tests.support.caches import STORED_LARGE as LARGE
from tests.support.caches import Filled, chain
from tests.support.pairs import connected, until


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


async def test_a_request_that_is_not_sent_leaves_no_error_behind() -> None:
    """The send fails with the connection, and nobody waits for the answer any more."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, what: reported.append(what)
    )
    async with connected("tcp", eager_bytes=0) as pair:
        active = ActiveConnection(pair.left, Welcome(VERSIONS[1]), 5.0)
        asking = asyncio.create_task(active.call(Flush(1), StoreDone))
        await asyncio.sleep(0)
        active._end("no answer within 5 s", lost=True)
        with pytest.raises(ConnectionLost, match="no answer within 5 s"):
            await asking
        del asking
        gc.collect()
        await asyncio.sleep(0)
    assert not reported


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
