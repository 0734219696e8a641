"""What is moved by ``kvwire bench fragments``: blocks of a cache, scattered over it.

The memory of a side is a pool with twice the blocks that travel. Which of them travel,
and in what order, is drawn at random for each side, and no two of them lie side by
side, so that nobody can merge two fragments into one. kvwire gets the block ids, and
everybody else the offsets that follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.cli.bench.case import Work

LAYERS_MAX: Final = 32
# The left and the right side have their blocks in different places.
LEFT: Final = 1
RIGHT: Final = 2
# Every other block of the pool, so that none that travel are neighbours.
_SPREAD: Final = 2
# Pools lie in memory that the other side can map.
ARENA: Final = "arena"


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentWork(Work):
    """``count`` fragments of ``nbytes`` bytes; ``verb`` is ``"push"`` or ``"pull"``.

    Attributes:
        layers: Layers of the cache.
        cross_layer: A block has all layers side by side, so that it is one fragment;
            otherwise each layer of a block is one.
    """

    layers: int
    cross_layer: bool = False

    @property
    def blocks(self) -> int:
        """Blocks that travel."""
        return self.count if self.cross_layer else self.count // self.layers

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.nbytes // self.layers if self.cross_layer else self.nbytes

    @property
    def pool_blocks(self) -> int:
        """Blocks of the pool."""
        return self.blocks * _SPREAD

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.pool_blocks * self.layers * self.layer_bytes

    @property
    def layout(self) -> str:
        """As it is shown."""
        return "cross-layer" if self.cross_layer else "per-layer"


def work_of(
    verb: str, layer_bytes: int, *, cross_layer: bool, round_bytes: int
) -> FragmentWork:
    """The work of about ``round_bytes``, of blocks with ``layer_bytes`` a layer."""
    fragments = max(2, round_bytes // layer_bytes)
    layers = min(LAYERS_MAX, fragments // 2)
    blocks = fragments // layers
    return FragmentWork(
        verb=verb,
        nbytes=layer_bytes * (layers if cross_layer else 1),
        count=blocks * (1 if cross_layer else layers),
        layers=layers,
        cross_layer=cross_layer,
    )


def block_ids(work: FragmentWork, side: int) -> npt.NDArray[np.int64]:
    """The blocks of one side that travel, in their order; of :data:`LEFT` or RIGHT."""
    return np.random.default_rng(side).permutation(work.blocks) * _SPREAD


def offsets(work: FragmentWork, side: int) -> npt.NDArray[np.int64]:
    """Where each fragment of one side begins in its pool, layer after layer."""
    blocks = block_ids(work, side)
    if work.cross_layer:
        return blocks * work.nbytes
    layers = np.arange(work.layers) * work.pool_blocks
    return ((layers[:, None] + blocks) * work.nbytes).ravel()
