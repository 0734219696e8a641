"""Caches in device memory, over transports that know host memory only.

A simulated device plays the GPU: host code that touched its memory would end the
process, and its streams run beside everything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvwire
from kvwire import BackendUnavailable, KVSpec, PagedCache, UsageError
from kvwire.limits import KIB, STAGING_SLOTS
from kvwire.memory.device.simulated import SimulatedArray, SimulatedDevice
from tests.support.pairs import Pair, connected, until

LAYERS, BLOCKS = 4, 40
# A layer of a block is 8 KiB, so a chunk of 64 KiB is some of them, cut somewhere.
SPEC = KVSpec(layers=LAYERS, kv_heads=4, head_dim=32, block_tokens=16, dtype="bfloat16")
LAYOUTS = {
    "NHD": (BLOCKS, 2, 16, 4, 32),
    "HND": (BLOCKS, 2, 4, 16, 32),
    "kv block token head dim": (2, BLOCKS, 16, 4, 32),
}
SOURCE = [7, 3, 39, 20, 21, 22, 0, 11, 30, 31, 5, 1]
TARGET = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24]
BOTH = pytest.mark.parametrize("scheme", ["tcp", "inproc"])


class Cache:
    """A cache on a device, or in host memory where there is none."""

    def __init__(
        self, device: SimulatedDevice | None, layout: str = "NHD", seed: int | None = 0
    ) -> None:
        shape = LAYOUTS[layout]
        values: list[npt.NDArray[Any]] = [
            np.zeros(shape, np.uint16)
            if seed is None
            else np.random.default_rng(seed + n).integers(0, 2**16, shape, np.uint16)
            for n in range(LAYERS)
        ]
        self.arrays: list[SimulatedArray] | None = None
        self._values = values
        if device is not None:
            self.arrays = [device.array(v, "torch.bfloat16") for v in values]
        self.layout = layout
        self.paged = PagedCache(SPEC, self.arrays or values, layout)

    def blocks(self, ids: list[int]) -> npt.NDArray[Any]:
        """Blocks of all layers in one order of axes: layer, block, kv, token, ..."""
        values = [a.read() for a in self.arrays] if self.arrays else self._values
        if self.layout == "HND":
            values = [v.transpose(0, 1, 3, 2, 4) for v in values]
        elif self.layout != "NHD":
            values = [v.transpose(1, 0, 2, 3, 4) for v in values]
        return np.stack([v[ids] for v in values])


@pytest.fixture
def near() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    yield device
    device.close()


@pytest.fixture
def far() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    yield device
    device.close()


@pytest.fixture(params=["tcp", "inproc"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with connected(request.param, chunk_bytes=64 * KIB) as made:
        yield made


@pytest.mark.parametrize("target_layout", list(LAYOUTS))
@pytest.mark.parametrize("source_layout", list(LAYOUTS))
async def test_from_device_to_device(
    source_layout: str,
    target_layout: str,
    near: SimulatedDevice,
    far: SimulatedDevice,
) -> None:
    source, target = Cache(near, source_layout), Cache(far, target_layout, None)
    async with connected("tcp", chunk_bytes=64 * KIB) as pair:
        inc = pair.left.pull("t", target.paged, TARGET)
        async with pair.far.publish("t", source.paged, SOURCE) as out:
            for layer in range(LAYERS):
                out.ready(layers=layer)
        assert (await inc).complete
        assert (await out).complete
        await inc.drained()
        await out.drained()
    assert np.array_equal(target.blocks(TARGET), source.blocks(SOURCE))
    untouched = [b for b in range(BLOCKS) if b not in TARGET]
    assert not target.blocks(untouched).any()


@pytest.mark.parametrize("device_side", ["producer", "consumer"])
async def test_a_device_at_one_end(
    pair: Pair, device_side: str, near: SimulatedDevice
) -> None:
    source = Cache(near if device_side == "producer" else None)
    target = Cache(near if device_side == "consumer" else None, seed=None)
    inc = pair.right.pull("t", target.paged, TARGET)
    async with pair.near.publish("t", source.paged, SOURCE) as out:
        out.ready()
    assert (await inc).complete
    await inc.drained()
    await out.drained()
    assert np.array_equal(target.blocks(TARGET), source.blocks(SOURCE))


@pytest.mark.parametrize("lanes", [2, 3])
async def test_over_lanes(
    lanes: int, near: SimulatedDevice, far: SimulatedDevice
) -> None:
    source, target = Cache(near), Cache(far, seed=None)
    async with connected("tcp", chunk_bytes=64 * KIB, lanes=lanes) as pair:
        inc = pair.far.expect("t", target.paged, TARGET)
        async with pair.left.push("t", source.paged, SOURCE) as out:
            out.ready()
        assert (await inc).complete
        await inc.drained()
        await out.drained()
    assert np.array_equal(target.blocks(TARGET), source.blocks(SOURCE))
