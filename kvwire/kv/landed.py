"""What of a transfer has landed: one bit for each layer and granule.

A segment lands whole once all of its chunks were verified, which sets its cells at
once. Of a segment that never became whole, the cells that no missing byte range touches
have landed too; the rest have not. Marking is idempotent, so a chunk that comes again
after a reconnect changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Final

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.blocks import Bits
from kvwire.kv.coverage import ANY, Coverage, mask_of
from kvwire.kv.plan import Segment, TransferPlan

_COMPLETE: Final = operator.attrgetter("complete")


class Landed:
    """Keeps the landed cells of one transfer, seen from one side.

    What the consumer had before counts as landed, if ``held``.
    """

    def __init__(self, plan: TransferPlan, *, held: bool = True) -> None:
        self.plan: TransferPlan = plan
        self._groups: list[Coverage] = []
        # Of each group that does not move as a whole, what moves of it.
        self._moving: list[int] = []
        for walk, part in zip(plan.groups, plan.maps, strict=True):
            cells = Coverage(len(walk.layers), walk.granules)
            self._groups.append(cells)
            self._moving.append(ANY if part.moves_all else mask_of(part.wanted))
            if held and not part.moves_all:
                for layer in range(len(walk.layers)):
                    cells.add_blocks(layer, mask_of(~part.wanted))

    def mark(self, segment: Segment) -> None:
        """Note that every byte of a segment has landed."""
        group, layer, layers, granule, granules = segment
        try:
            top = layer - self.plan.groups[group].layers.start
            self._groups[group].claim(
                range(top, top + layers), range(granule, granule + granules), 0
            )
        except (IndexError, ValueError):
            self.plan.check(segment)  # which says what is outside
            raise

    def claim(self, segment: Segment) -> bool:
        """Mark a segment; False, and nothing, if a byte that moves in it was marked."""
        group, layer, layers, granule, granules = segment
        try:
            top = layer - self.plan.groups[group].layers.start
            return self._groups[group].claim(
                range(top, top + layers),
                range(granule, granule + granules),
                self._moving[group],
            )
        except (IndexError, ValueError):
            self.plan.check(segment)
            raise

    def mark_granules(self, group: int, granules: Bits) -> None:
        """Note granules of a group landed in every layer: (granules,)."""
        mask = mask_of(granules)
        for layer in range(len(self.plan.groups[group].layers)):
            self._groups[group].add_blocks(layer, mask)

    def mark_but(self, segment: Segment, missing: Iterable[tuple[int, int]]) -> None:
        """Note that every byte of a segment has landed but some (offset, bytes)."""
        self.plan.check(segment)
        whole = np.ones((segment.layers, segment.granules), np.bool_)
        for offset, nbytes in missing:
            whole &= ~self.plan.touched(segment, offset, nbytes)
        top = segment.layer - self.plan.groups[segment.group].layers.start
        for layer, granules in enumerate(whole, top):
            mask = mask_of(granules) << segment.granule
            self._groups[segment.group].add_blocks(layer, mask)

    def mark_boxes(self, boxes: Sequence[Segment]) -> None:
        """Note what a peer says has landed, as :meth:`boxes` returns it.

        Boxes that overlap are refused, and more of them than whole rows would need: to
        find what they leave out must cost no more than to read them.
        """
        if not boxes:
            return
        told = [
            np.zeros((len(w.layers), w.granules), np.bool_) for w in self.plan.groups
        ]
        room = sum(cells.size for cells in told)
        for box in boxes:
            self.plan.check(box)
            room -= box.layers * box.granules
            if room < 0:
                break
            first = self.plan.groups[box.group].layers.start
            rows = slice(box.layer - first, box.layer - first + box.layers)
            told[box.group][rows, box.granule_slice] = True
        by_rows = chain.from_iterable(map(_boxes, told))
        if room < 0 or len(list(islice(by_rows, len(boxes) + 1))) > len(boxes):
            raise UsageError(
                f"landed: {len(boxes)} boxes that overlap, or are not cut by rows"
            )
        for box in boxes:
            self.mark(box)

    def has(self, segment: Segment) -> bool:
        """Tell whether every byte of a segment has landed."""
        return bool(self._cells(segment).all())

    def boxes(self, most: int) -> list[Segment]:
        """Return what has landed as segments, ``most`` of them at most."""
        found = (
            Segment(index, walk.layers.start + top, layers, left, granules)
            for index, walk in enumerate(self.plan.groups)
            for top, layers, left, granules in _boxes(self._all_cells(index))
        )
        return list(islice(found, most))

    def lacking(self, segment: Segment) -> list[Segment]:
        """Return the parts of a segment that have not landed.

        What the consumer had before is in them or not, whatever makes fewer of them: it
        does not move in any case.
        """
        held = ~self.plan.maps[segment.group].wanted[segment.granule_slice]
        return [
            Segment(
                segment.group,
                segment.layer + top,
                layers,
                segment.granule + left,
                granules,
            )
            for top, layers, left, granules in _boxes(~self._cells(segment) | held)
        ]

    @property
    def left(self) -> int:
        """Return how many cells have not landed."""
        return sum(cells.left for cells in self._groups)

    @property
    def complete(self) -> bool:
        """Tell whether everything has landed."""
        return all(map(_COMPLETE, self._groups))

    @property
    def layers(self) -> int:
        """Return how many layers of every block have landed, over all groups."""
        return sum(cells.whole_layers.bit_count() for cells in self._groups)

    @property
    def nbytes(self) -> int:
        """Return how many payload bytes have landed, without what was there before."""
        return sum(
            (cells.blocks_of(layer) & moving).bit_count() * part.granule_bytes
            for part, cells, moving in zip(
                self.plan.maps, self._groups, self._moving, strict=True
            )
            for layer in range(len(part.walk.layers))
        )

    def layer(self, layer: int, group: str | None = None) -> bool:
        """Tell whether a layer, by the model's index, of every block has landed.

        One that the transfer does not carry is not waited for.
        """
        groups = range(len(self.plan.groups))
        if group is not None:
            groups = range(index := self.plan.group_index(group), index + 1)
        for index in groups:
            layers = self.plan.groups[index].layers
            if layer in layers:
                whole = self._groups[index].whole_layers >> (layer - layers.start)
                if not whole & 1:
                    return False
        return True

    def by_layer(self, group: int) -> Bits:
        """Return which layers of which local blocks landed: (layers, blocks)."""
        cells = self._all_cells(group)
        per_block = self.plan.maps[group].granules_per_block
        blocks = self.plan.lists[self.plan.groups[group].group].size
        # The last block may have room behind the last granule; nothing is owed there.
        padded = np.ones((cells.shape[0], blocks * per_block), np.bool_)
        padded[:, : cells.shape[1]] = cells
        whole: Bits = np.logical_and.reduce(
            padded.reshape(cells.shape[0], blocks, per_block), axis=2
        )
        return whole

    def blocks(self, group: int) -> Bits:
        """Return which local blocks landed in every layer: (blocks,)."""
        whole: Bits = np.logical_and.reduce(self.by_layer(group), axis=0)
        return whole

    @property
    def usable_tokens(self) -> int:
        """Return how many leading tokens are here in every layer and group.

        A group that lists fewer tokens than another holds a window on the last of them.
        Its window for an earlier end is not here, so short of everything there is no
        usable prefix. Nor is there one of a recurrent state.
        """
        tokens = [walk.tokens for walk in self.plan.groups]
        states = [g.spec.kind == "state" for g in self.plan.local.groups]
        if len(set(tokens)) > 1 or any(states):
            return max(tokens) if self.complete else 0
        return min(self._leading_tokens(index) for index in range(len(tokens)))

    @property
    def usable_prefix(self) -> int:
        """:attr:`usable_tokens` in blocks of the first group that lists the most."""
        tokens = [walk.tokens for walk in self.plan.groups]
        longest = tokens.index(max(tokens))
        group = self.plan.local.groups[longest]
        usable = self.usable_tokens
        if usable == tokens[longest]:
            return group.blocks
        return usable // group.spec.block_tokens

    def _leading_tokens(self, group: int) -> int:
        landed = self.blocks(group)
        leading = landed.size if landed.all() else int(landed.argmin())
        walk = self.plan.groups[group]
        block_tokens = self.plan.local.groups[group].spec.block_tokens
        return min(leading * block_tokens, walk.tokens)

    def _cells(self, segment: Segment) -> Bits:
        """Return the cells of a segment: (layers, granules)."""
        self.plan.check(segment)
        top = segment.layer - self.plan.groups[segment.group].layers.start
        rows = self._groups[segment.group].cells(range(top, top + segment.layers))
        return rows[:, segment.granule_slice]

    def _all_cells(self, group: int) -> Bits:
        return self._groups[group].cells(range(len(self.plan.groups[group].layers)))


def _boxes(cells: Bits) -> Iterator[tuple[int, int, int, int]]:
    """Return the cells that are set, as boxes: (row, rows, column, columns).

    Rows that are equal and lie together make one box of each run of their columns,
    which is one box in all where layers have landed one after the other.
    """
    if not cells.size:
        return
    steps = np.flatnonzero((cells[1:] != cells[:-1]).any(axis=1)) + 1
    for top, end in pairwise([0, *steps.tolist(), cells.shape[0]]):
        row = np.concatenate(([False], cells[top], [False]))
        edges = np.flatnonzero(row[1:] != row[:-1]).tolist()
        for left, right in zip(edges[::2], edges[1::2], strict=True):
            yield top, end - top, left, right - left
