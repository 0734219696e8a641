"""A client of a store server in a process of its own, which a test kills.

``python -m tests.store.client_child TIER put|get BLOCKS`` does one of the two.
"""

from __future__ import annotations

import asyncio
import sys

from kvwire import BlockStore, KVSpec
from tests.store.caches import Filled, chain

LARGE = KVSpec(layers=4, kv_heads=4, head_dim=64, block_tokens=16, dtype="float16")
"""Of 64 KiB a block, so that a few hundred of them take a while."""


async def _run(tier: str, verb: str, blocks: int) -> None:
    cache = Filled(blocks, LARGE, seed=7 if verb == "put" else None).cache
    async with BlockStore.open(["memory:64MiB", tier]) as store:
        await getattr(store, verb)(chain(blocks), cache, range(blocks))


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], sys.argv[2], int(sys.argv[3])))
