"""On a GPU: blocks into a store and out of it, in the order of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvwire import PagedCache
from kvwire_store import BlockStore
from tests.gpu.devices import LIBRARIES, Gpu
from tests.support.caches import STORED_LARGE as LARGE
from tests.support.caches import Filled, chain

pytestmark = pytest.mark.gpu
IDS = [7, 3, 15, 0, 11, 12]
INTO = [2, 4, 6, 8, 10, 1]


@pytest.mark.parametrize("library", LIBRARIES)
async def test_blocks_come_back_behind_the_kernels_around_them(
    library: str, tmp_path: Any
) -> None:
    """What slow kernels write is put; what they still read is not overwritten."""
    host, hashes = Filled(16, LARGE, "NHD", 1).tensors, chain(len(IDS))
    gpu = Gpu(library)
    zeros = [np.zeros_like(tensor) for tensor in host]
    source, target = [[gpu.array(z) for z in zeros] for _ in range(2)]
    written = [gpu.array(tensor) for tensor in host]
    async with BlockStore.open(
        ["memory:2MiB", f"disk:{tmp_path / 'kv'}?size=4MiB"]
    ) as store:
        gpu.spin(0.2)
        for array, values in zip(source, written, strict=True):
            array[:] = values
        request = store.put(hashes, PagedCache(LARGE, source), IDS)
        assert (await request).complete
        await request.drained()
        gpu.spin(0.2)
        read = [array + 0 for array in target]
        assert (await store.get(hashes, PagedCache(LARGE, target), INTO)).complete
    for values, before, after in zip(host, read, target, strict=True):
        assert not gpu.values(before, values).any()
        assert gpu.values(after, values)[INTO].tobytes() == values[IDS].tobytes()
