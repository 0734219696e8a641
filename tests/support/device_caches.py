"""Caches in the memory of simulated devices, compared in any layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvwire import KVSpec, PagedCache
from kvwire.kv.layout import AxisOrder
from tests.support.simulated_device import SimulatedArray, SimulatedDevice

LAYERS, BLOCKS = 4, 40
# A layer of a block is 8 KiB, so a chunk of 64 KiB is some of them, cut somewhere.
SPEC = KVSpec(layers=LAYERS, kv_heads=4, head_dim=32, block_tokens=16, dtype="bfloat16")
LAYOUTS = {
    "NHD": (BLOCKS, 2, 16, 4, 32),
    "HND": (BLOCKS, 2, 4, 16, 32),
    "kv block token head dim": (2, BLOCKS, 16, 4, 32),
}


class DeviceCache:
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
        self.values = values
        if device is not None:
            self.arrays = [device.array(v, "torch.bfloat16") for v in values]
        self.device = device
        self.layout = layout
        self.paged = PagedCache(SPEC, self.arrays or values, AxisOrder(layout))

    def blocks(self, ids: list[int]) -> npt.NDArray[Any]:
        """Blocks of all layers in one order of axes: layer, block, kv, token, ..."""
        values = [a.read() for a in self.arrays] if self.arrays else self.values
        if self.layout == "HND":
            values = [v.transpose(0, 1, 3, 2, 4) for v in values]
        elif self.layout != "NHD":
            values = [v.transpose(1, 0, 2, 3, 4) for v in values]
        return np.stack([v[ids] for v in values])

    def overwrite(self, ids: list[int]) -> None:
        """Write other values, as a kernel does that a stream runs now."""
        for array in self.arrays or ():
            values = array.read()
            values[ids] ^= 0xFFFF
            array.write(values)
