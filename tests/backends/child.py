"""A peer in a process of its own, data over a lane; see tests/support/child.py.

It receives what comes with tag 1, or does nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager

import kvwire
from kvwire import Communicator
from kvwire_nixl.library import NixlAgent
from kvwire_nixl.settings import parse
from kvwire_ucx.library import answer
from tests.support.child import Child, started, stay


def child(
    comm: Communicator, manner: str = "receive"
) -> AbstractAsyncContextManager[Child]:
    """Start a peer that connects to a communicator, with the same configuration."""
    (backend,) = comm.config.require
    return started(
        comm,
        "tests.backends.child",
        backend,
        manner,
        json.dumps(comm.config.backends.get(backend, {})),
        comm.config.ping_interval_s,
    )


async def _main(
    address: str, backend: str, manner: str, settings: str, *, ping_interval_s: float
) -> None:
    if backend == "nixl":
        # Another UCX is in the process, as behind any look at all transports; NIXL must
        # not call that in the place of its own.
        answer()
        # Its first agent takes a process longer than a lane may on a busy machine.
        NixlAgent(parse({}), "first").close()
    async with kvwire.open(
        name="child",
        ping_interval_s=ping_interval_s,
        backends={backend: json.loads(settings)},
    ) as comm:
        connection = await comm.connect(address, transport=backend)
        await stay(connection, tag=1 if manner == "receive" else 9)


if __name__ == "__main__":
    *words, interval_s = sys.argv[1:]
    asyncio.run(_main(*words, ping_interval_s=float(interval_s)))
