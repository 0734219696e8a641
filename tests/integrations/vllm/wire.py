"""A slow wire between two engines, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from kvwire.types import Address
from tests.support.proxy import Bandwidth, Direction, Proxy


@contextmanager
def slow_wire(server: str, bytes_per_s: int) -> Iterator[str]:
    """An address from which everything goes on to a server, at a limited rate."""
    ready: Future[str] = Future()
    ending = threading.Event()

    async def carry() -> None:
        toxics = (Bandwidth(way, bytes_per_s) for way in Direction)
        async with Proxy(Address.parse(server), *toxics) as proxy:
            ready.set_result(str(proxy.address))
            await asyncio.to_thread(ending.wait)

    thread = threading.Thread(target=asyncio.run, args=(carry(),))
    thread.start()
    try:
        yield ready.result(10)
    finally:
        ending.set()
        thread.join()
