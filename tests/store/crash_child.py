"""Puts chains into a store until it kills itself, and says which puts were complete.

python -m tests.store.crash_child DIRECTORY KILL_AT TORN
"""

from __future__ import annotations

import asyncio
import sys

from tests.store.caches import Filled, chain
from tests.store.files import Killer, disk, kill_myself, store_on

CHAINS = 12
BLOCKS = 6
SIZE = "160KiB&slab=64KiB"
"""Room for five chains: from the sixth on, slots are taken that held others."""


def name_of(seed: int) -> list[bytes]:
    """The hashes of one chain."""
    return chain(BLOCKS, f"chain {seed}")


async def main(directory: str, kill_at: int, torn: bool) -> None:
    """Put one chain after the other."""
    killer = Killer(kill_at, torn=torn, end=kill_myself)
    tier = await disk(directory, SIZE, killer)
    async with store_on(tier, memory="memory:64KiB") as store:
        for seed in range(CHAINS):
            source = Filled(BLOCKS, seed=seed)
            outcome = await store.put(name_of(seed), source.cache, list(range(BLOCKS)))
            assert outcome.complete, outcome.missing
            print(seed, flush=True)
    print("calls", killer.count, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "torn"))
