"""The marked or landed layers of each block, as bits of integers.

Marks are made in the middle of a forward pass, so a mark must cost only a few integer
operations. If a layer was added for all blocks, it is a bit of one integer; each other
layer has an integer with one bit per block. Boolean arrays take five times as long.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvwire.kv.blocks import Bits

ANY: Final = -1
"""A mask of all blocks."""


class Coverage:
    """The cells (layer, block) that have been added to one group.

    Attributes:
        whole_layers: One bit per layer, set once all its blocks were added.
        complete: Whether every cell was added.
    """

    __slots__ = (
        "_all_blocks",
        "_all_layers",
        "_begun",
        "_bits",
        "_blocks",
        "_layers",
        "complete",
        "whole_layers",
    )

    def __init__(self, layers: int, blocks: int) -> None:
        self._layers = layers
        self._blocks = blocks
        self._all_layers = (1 << layers) - 1
        self._all_blocks = (1 << blocks) - 1
        # Without blocks there is nothing to add.
        self.whole_layers: int = 0 if blocks else self._all_layers
        self.complete: bool = not blocks
        # Layers with some blocks but not all: one bit per such layer, and the blocks of
        # each.
        self._begun = 0
        self._bits: dict[int, int] = {}

    def claim(self, layers: range, blocks: range, among: int = ANY) -> bool:
        """Add cells unless any was added before; return whether they were added.

        Only blocks in the mask ``among`` count as added before.

        Raises:
            IndexError, ValueError: Cells are outside the group.
        """
        rows = (1 << layers.stop) - (1 << layers.start)
        if rows > self._all_layers or blocks.stop > self._blocks:
            raise IndexError(f"{layers}, {blocks}")
        if rows & (self.whole_layers | self._begun):
            if among and self.overlaps(layers, blocks, among):
                return False
        elif blocks and len(blocks) == self._blocks:
            self.whole_layers |= rows
            self.complete = self.whole_layers == self._all_layers
            return True
        mask = _mask(blocks)
        for layer in layers if mask else ():
            self.add_blocks(layer, mask)
        return True

    def overlaps(self, layers: range, blocks: range, among: int = ANY) -> bool:
        """Return whether any of these cells in the mask ``among`` was added before."""
        rows = (1 << layers.stop) - (1 << layers.start)
        mask = _mask(blocks) & among
        if rows & self.whole_layers and mask:
            return True
        if not rows & self._begun:
            return False
        return any(self._bits.get(layer, 0) & mask for layer in layers)

    def add_blocks(self, layer: int, mask: int) -> None:
        """Add a mask of blocks to one layer; blocks added before stay added."""
        row = 1 << layer
        if row & self.whole_layers:
            return
        bits = self._bits.get(layer, 0) | mask
        if bits == self._all_blocks:
            self.whole_layers |= row
            self.complete = self.whole_layers == self._all_layers
            self._begun &= ~row
            self._bits.pop(layer, None)
        else:
            self._begun |= row
            self._bits[layer] = bits

    def blocks_of(self, layer: int) -> int:
        """Return a mask of the blocks that were added to one layer."""
        if self.whole_layers >> layer & 1:
            return self._all_blocks
        return self._bits.get(layer, 0)

    def cells(self, layers: range) -> Bits:
        """Return some layers' cells as booleans, True where added: (layers, blocks)."""
        nbytes = -(-self._blocks // 8)
        rows = [self.blocks_of(layer).to_bytes(nbytes, "little") for layer in layers]
        bits = np.frombuffer(bytearray().join(rows), np.uint8)
        cells = np.unpackbits(
            bits.reshape(len(layers), nbytes),
            axis=1,
            count=self._blocks,
            bitorder="little",
        )
        return cells.view(np.bool_)

    @property
    def left(self) -> int:
        """Return the number of cells not added yet."""
        layers = self._layers - self.whole_layers.bit_count()
        return layers * self._blocks - sum(map(int.bit_count, self._bits.values()))

    @property
    def untouched(self) -> int:
        """Return the number of layers without an added block."""
        return (self._all_layers & ~self.whole_layers & ~self._begun).bit_count()

    def first_gap(self) -> tuple[int, int]:
        """Return the first (layer, block) not added yet; there must be one."""
        assert not self.complete
        layer = _lowest(self._all_layers & ~self.whole_layers)
        return layer, _lowest(self._all_blocks & ~self._bits.get(layer, 0))


def mask_of(blocks: Bits) -> int:
    """Return one boolean per block as a mask."""
    return int.from_bytes(np.packbits(blocks, bitorder="little").tobytes(), "little")


def _mask(indices: range) -> int:
    return ((1 << len(indices)) - 1) << indices.start


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
