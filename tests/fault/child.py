"""A peer in a process of its own; see tests/support/child.py."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager

import kvwire
from kvwire import Communicator
from tests.support.child import Child, started, stay


def child(comm: Communicator) -> AbstractAsyncContextManager[Child]:
    """Start a peer that connects to a communicator, with the same pings."""
    pings = comm.config.ping_interval_s, comm.config.ping_misses
    return started(comm, "tests.fault.child", *pings)


async def _main(address: str, ping_interval_s: float, ping_misses: int) -> None:
    async with kvwire.open(
        name="child", ping_interval_s=ping_interval_s, ping_misses=ping_misses
    ) as comm:
        await stay(await comm.connect(address))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
