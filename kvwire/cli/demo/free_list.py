"""Blocks of a pool, handed out in no particular order."""

from __future__ import annotations

import numpy as np


class FreeList:
    """Which blocks are free.

    Shuffled, as the pool of an engine is after an hour: the blocks of a request lie
    scattered, and elsewhere on the other side.
    """

    def __init__(self, num_blocks: int, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(num_blocks)
        self._free: list[int] = order.tolist()

    def take(self, count: int) -> list[int]:
        """Any ``count`` free blocks."""
        if count > len(self._free):
            raise MemoryError(f"{count} blocks wanted, {len(self._free)} are free")
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """These are free again."""
        self._free.extend(blocks)
