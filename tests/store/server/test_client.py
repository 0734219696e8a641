"""A line to a store server; what it does for its tier is in test_remote."""

from __future__ import annotations

import asyncio

import pytest

import kvwire
from kvwire import ConnectionLost
from kvwire.store.server.client import StoreClient


async def test_what_is_asked_while_it_is_down_fails_at_once() -> None:
    async with kvwire.open() as communicator:
        line = StoreClient(communicator, "127.0.0.1:9", 1.0, lambda: None)
        with pytest.raises(ConnectionLost, match="not dialled yet"):
            line.now()
        await line.open()
        with pytest.raises(ConnectionLost, match="Connection refused"):
            line.now()
        await line.close()
        await line.close()


async def test_a_cancelled_close_is_cancelled() -> None:
    """And not taken for the end of what it waits for."""
    async with kvwire.open() as communicator:
        line = StoreClient(communicator, "127.0.0.1:9", 1.0, lambda: None)
        go = asyncio.Event()

        async def slow() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await go.wait()

        line._keeping = asyncio.create_task(slow())
        await asyncio.sleep(0)
        closing = asyncio.create_task(line.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait((closing,))
        assert closing.cancelled()
        go.set()
        await line.close()
