"""A process that closes workers to which a peer has just begun to connect.

UCX 1.13 ends it, unless the worker has had time to answer. It prints how far the
connection was each time that it has come through.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from kvwire_ucx.bootstrap import UcxBootstrap
from kvwire_ucx.context import Context
from kvwire_ucx.requests import MemoryHandles
from kvwire_ucx.worker import UcxEndpoint, Worker

# More than there are until the peer's first message has come.
STEPS: Final = 8
# A step waits for UCX's own thread to bring it the one before; some wait in vain.
_SPINS: Final = 20_000
# How long the peer is busy with other things meanwhile, in turns of the loop.
_BUSY_TURNS: Final = 100


async def close_after(steps: int, transports: str) -> None:
    """Close a worker after so many steps of a connection to it."""
    context = Context({"TLS": transports})
    worker = Worker(context, asyncio.get_running_loop())
    # Its loop never runs: it takes a turn when it is told to.
    loop_of_peer = asyncio.new_event_loop()
    peer = Worker(context, loop_of_peer)
    version = context.library.version
    there = UcxBootstrap(lane=1, version=version, address=worker.address)
    way = UcxEndpoint(peer, there, lambda status: None)
    # One that wants an answer: UCX then makes the worker an endpoint of its own.
    peer.send(
        way.handle, MemoryHandles(memoryview(b"hello")), 1, lambda status, nbytes: None
    )
    for step in range(steps):
        _progress(worker if step % 2 else peer)
    closed = asyncio.Event()

    def close() -> None:
        worker.close()
        closed.set()

    worker.when_idle(close)
    for _ in range(_BUSY_TURNS):
        await asyncio.sleep(0)
    way.close(lambda: None)
    while not (closed.is_set() and way.gone):
        peer._turn()
        await asyncio.sleep(0)
    peer.close()
    loop_of_peer.close()
    context.close()


def _progress(worker: Worker) -> None:
    for _ in range(_SPINS):
        if worker._ucp.worker_progress(worker.handle):
            worker._used = True  # as its own turns would note
            return


async def main(transports: str) -> None:
    """Close a worker at each step."""
    for steps in range(STEPS):
        await close_after(steps, transports)
        print(steps, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
