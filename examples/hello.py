"""Two processes: decode lends memory, prefill writes into it and reports that.

python examples/hello.py decode python examples/hello.py prefill 127.0.0.1:7400    # the
address that decode printed
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Final

import numpy as np

import kvwire

# You choose the tags; both sides must use the same ones.
GRANT: Final = 1
DONE: Final = 2

BLOCK_BYTES: Final = 64 * 1024
BLOCKS: Final = 16


async def decode() -> None:
    """Lend a cache to the first peer that connects, and wait for its block 3."""
    async with kvwire.open(name="decode-0") as comm:
        print(await comm.listen("127.0.0.1:0"), flush=True)
        conn = await anext(comm.connections())

        cache = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        region = comm.register(cache, access="write")
        await conn.send(GRANT, region.grant(conn).to_bytes())

        message = await conn.recv(DONE)
        await region.close()  # returns once nothing can write to the cache any more
        print(f"{conn.peer.name} over {conn.transport}: {message.decode()}")
        print("block 3 is", "there" if (cache[3] == 42).all() else "not there")
        print("its neighbours are", "whole" if not cache[[2, 4]].any() else "hit")


async def prefill(address: str) -> None:
    """Write one block into the memory that decode has granted."""
    async with kvwire.open(name="prefill-0") as comm:
        conn = await comm.connect(address)
        grant = kvwire.Grant.from_bytes(await conn.recv(GRANT))

        block = np.full(BLOCK_BYTES, 42, dtype=np.uint8)
        start = 3 * BLOCK_BYTES
        await conn.put(block, grant[start : start + BLOCK_BYTES])
        # The put has ended, so every byte is in place: this message cannot be too
        # early.
        await conn.send(DONE, b"block 3 is written")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["decode"]:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(decode())
        case ["prefill", address]:
            try:
                asyncio.run(prefill(address))
            except kvwire.ConnectError as exc:
                sys.exit(f"{exc}; start decode first")
        case _:
            sys.exit(__doc__)
