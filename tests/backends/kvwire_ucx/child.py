"""A peer in a process of its own, with its data over UCX; see tests/support/child.py.

It receives what comes with tag 1, or does nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager

import kvwire
from kvwire import Communicator
from tests.support.child import Child, started, stay


def child(
    comm: Communicator, manner: str = "receive"
) -> AbstractAsyncContextManager[Child]:
    """Start a peer that connects to a communicator, with the same configuration."""
    settings = comm.config.backends["ucx"]
    module = "tests.backends.kvwire_ucx.child"
    return started(
        comm, module, manner, json.dumps(settings), comm.config.ping_interval_s
    )


async def _main(
    address: str, manner: str, settings: str, ping_interval_s: float
) -> None:
    async with kvwire.open(
        name="child",
        ping_interval_s=ping_interval_s,
        backends={"ucx": json.loads(settings)},
    ) as comm:
        connection = await comm.connect(address, transport="ucx")
        await stay(connection, tag=1 if manner == "receive" else 9)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
