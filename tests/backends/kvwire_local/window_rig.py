"""An owner's cache with its generations, and batches of its blocks for a reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvwire.backend import BlockRead, WindowMemory
from kvwire.kv.fragments import Array
from kvwire.memory.arena import Arena
from kvwire.memory.generations import Generations
from kvwire_certify.oracle import content

Bytes = npt.NDArray[np.uint8]


class OwnersCache:
    """A cache of several layers, each with blocks of ``run`` bytes.

    It lies in an arena, or else in ordinary memory.
    """

    def __init__(self, layers: int, count: int, run: int, *, in_arena: bool) -> None:
        self.run = run
        self.generations = Generations(count)
        self.arena = Arena(layers * (count * run + 64)) if in_arena else None
        self.layers: list[Bytes] = [
            np.empty((count, run), np.uint8)
            if self.arena is None
            else self.arena.numpy((count, run), np.uint8)
            for _ in range(layers)
        ]
        for number, layer in enumerate(self.layers):
            layer.reshape(-1).data[:] = content(layer.nbytes, number)
        self.memory = WindowMemory(
            spans=tuple((address(layer), layer.nbytes) for layer in self.layers),
            table=(self.generations.address, self.generations.nbytes),
        )

    def close(self) -> None:
        self.layers.clear()
        self.generations.close()
        if self.arena is not None:
            self.arena.close()


class ReadersCache:
    """Memory of the same shape that blocks are read into."""

    def __init__(self, owner: OwnersCache) -> None:
        self.run = owner.run
        self.layers = [np.zeros_like(layer) for layer in owner.layers]
        self._from = column([address(layer) for layer in owner.layers])
        self._to = column([address(layer) for layer in self.layers])

    def batch(
        self, ids: Sequence[int], generations: Array, to: Sequence[int], **other: Any
    ) -> BlockRead:
        """The blocks of these ids, into others."""
        batch = BlockRead(
            pieces_from=self._from,
            pieces_to=self._to,
            run=self.run,
            offsets_from=column(ids) * np.uint64(self.run),
            offsets_to=column(to) * np.uint64(self.run),
            entries=column(ids),
            generations=generations,
            per_block=1,
            owner=self.layers,
        )
        return batch._replace(**other)

    def has(self, owner: OwnersCache, block: int, to: int) -> bool:
        """Whether a block is here as its owner has it."""
        pairs = zip(self.layers, owner.layers, strict=True)
        return all(np.array_equal(mine[to], its[block]) for mine, its in pairs)


def tickets(owner: OwnersCache, ids: Sequence[int]) -> Array:
    return owner.generations.current(np.array(ids))


def column(numbers: Sequence[int]) -> Array:
    return np.array(numbers, np.int64).astype(np.uint64)


def address(array: Bytes) -> int:
    return int(array.ctypes.data)
