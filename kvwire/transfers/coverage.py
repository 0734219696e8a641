"""Which layers of which blocks have been marked, each at most once.

One mark is a few operations on integers, since it is made in the middle of a forward
pass: a bit for each layer that is marked in whole, and for the others an integer with a
bit for each block. On arrays of booleans the same takes five times as long.
"""

from __future__ import annotations


class Coverage:
    """Records which cells, layers times blocks, of one group were marked."""

    __slots__ = ("_all_blocks", "_all_layers", "_begun", "_bits", "_blocks", "_whole")

    def __init__(self, layers: int, blocks: int) -> None:
        self._blocks = blocks
        self._all_layers = (1 << layers) - 1
        self._all_blocks = (1 << blocks) - 1
        # Layers that are marked in whole. Without blocks there is nothing to mark.
        self._whole = 0 if blocks else self._all_layers
        # Layers of which some blocks are marked, and which blocks those are.
        self._begun = 0
        self._bits: dict[int, int] = {}

    def overlaps(self, layers: range, blocks: range) -> bool:
        """Tell whether any of these cells was added before."""
        if not blocks:
            return False
        wanted = (1 << layers.stop) - (1 << layers.start)
        if wanted & self._whole:
            return True
        if not wanted & self._begun:
            return False
        mask = _mask(blocks)
        return any(self._bits.get(layer, 0) & mask for layer in layers)

    def add(self, layers: range, blocks: range) -> None:
        """Add cells that were not added before."""
        if len(blocks) == self._blocks:
            self._whole |= (1 << layers.stop) - (1 << layers.start)
            return
        if not blocks:
            return
        mask = _mask(blocks)
        for layer in layers:
            bits = self._bits.get(layer, 0) | mask
            if bits == self._all_blocks:
                self._whole |= 1 << layer
                self._begun &= ~(1 << layer)
                self._bits.pop(layer, None)
            else:
                self._begun |= 1 << layer
                self._bits[layer] = bits

    @property
    def complete(self) -> bool:
        """Tell whether every cell was added."""
        return self._whole == self._all_layers

    @property
    def whole(self) -> int:
        """Return how many layers were added in whole."""
        return self._whole.bit_count()

    @property
    def untouched(self) -> int:
        """Return how many layers have no block that was added."""
        return (self._all_layers & ~self._whole & ~self._begun).bit_count()

    def first_gap(self) -> tuple[int, int]:
        """Return the first (layer, block) that was not added; there must be one."""
        assert not self.complete
        layer = _lowest(self._all_layers & ~self._whole)
        return layer, _lowest(self._all_blocks & ~self._bits.get(layer, 0))


def _mask(indices: range) -> int:
    return ((1 << len(indices)) - 1) << indices.start


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
