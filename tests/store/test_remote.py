"""A tier at a server of another process: contents, and what is left when it dies."""

from __future__ import annotations

import numpy as np

from kvwire import BlockStore
from tests.store.caches import Filled, chain
from tests.store.server_child import serving


async def test_blocks_of_one_process_are_got_by_another() -> None:
    """Put over one connection, got over another one, through a third process."""
    hashes, blocks = chain(8), list(range(8))
    async with serving("--tier", "memory:4MiB") as server:
        source = Filled(seed=1)
        async with BlockStore.open(["memory:1MiB", server.where]) as store:
            assert (await store.put(hashes, source.cache, blocks)).complete
        target = Filled(layout="HND")
        backwards = blocks[::-1]
        async with BlockStore.open([server.where]) as store:
            assert await store.match(hashes, target.cache) == 8
            assert (await store.get(hashes, target.cache, backwards)).complete
        assert np.array_equal(source.tokens(blocks), target.tokens(backwards))
