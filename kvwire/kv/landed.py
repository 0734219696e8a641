"""The landed parts of a transfer: one bit per layer and granule.

Once all chunks of a segment were verified, all its cells count as landed. In a segment
that stays incomplete, a cell has landed if no missing byte range touches it. Marking is
idempotent, so a chunk that is sent again after a reconnect changes nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Final

import numpy as np

from kvwire.errors import UsageError
from kvwire.kv.blocks import Bits
from kvwire.kv.coverage import ANY, Coverage, mask_of
from kvwire.kv.plan import Segment, TransferPlan

_COMPLETE: Final = operator.attrgetter("complete")


class Landed:
    """The landed cells of one transfer, from one side's view.

    ``held`` marks cells that the consumer had before the transfer; they count as
    landed.
    """

    def __init__(self, plan: TransferPlan, *, held: bool = True) -> None:
        self.plan: TransferPlan = plan
        self._groups: list[Coverage] = []
        # For each group, a mask of the granules that move.
        self._moving: list[int] = []
        for walk, part in zip(plan.groups, plan.maps, strict=True):
            cells = Coverage(len(walk.layers), walk.granules)
            self._groups.append(cells)
            self._moving.append(ANY if part.moves_all else mask_of(part.wanted))
            if held and not part.moves_all:
                for layer in range(len(walk.layers)):
                    cells.add_blocks(layer, mask_of(~part.wanted))

    def mark(self, segment: Segment) -> None:
        """Record that every byte of a segment has landed."""
        group, layer, layers, granule, granules = segment
        try:
            top = layer - self.plan.groups[group].layers.start
            self._groups[group].claim(
                range(top, top + layers), range(granule, granule + granules), 0
            )
        except (IndexError, ValueError):
            self.plan.check(segment)  # raises, naming the field
            raise

    def claim(self, segment: Segment) -> bool:
        """Mark a segment; return False instead if a moving cell was marked before."""
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
        """Record that these granules of a group, a mask, have landed in all layers."""
        mask = mask_of(granules)
        for layer in range(len(self.plan.groups[group].layers)):
            self._groups[group].add_blocks(layer, mask)

    def mark_but(self, segment: Segment, missing: Iterable[tuple[int, int]]) -> None:
        """Record that a segment landed, except for byte ranges (offset, bytes)."""
        self.plan.check(segment)
        whole = np.ones((segment.layers, segment.granules), np.bool_)
        for offset, nbytes in missing:
            whole &= ~self.plan.touched(segment, offset, nbytes)
        top = segment.layer - self.plan.groups[segment.group].layers.start
        for layer, granules in enumerate(whole, top):
            mask = mask_of(granules) << segment.granule
            self._groups[segment.group].add_blocks(layer, mask)

    def mark_boxes(self, boxes: Sequence[Segment]) -> None:
        """Record the boxes that a peer reports as landed; see :meth:`boxes`.

        Checking a report must not cost more than reading it. So boxes must not overlap,
        and there may be no more of them than cutting by rows needs.

        Raises:
            UsageError: Boxes overlap, are too many, or lie outside the transfer.
        """
        if not boxes:
            return
        marked = [
            np.zeros((len(w.layers), w.granules), np.bool_) for w in self.plan.groups
        ]
        room = sum(cells.size for cells in marked)
        for box in boxes:
            self.plan.check(box)
            room -= box.layers * box.granules
            if room < 0:
                break
            first = self.plan.groups[box.group].layers.start
            rows = slice(box.layer - first, box.layer - first + box.layers)
            marked[box.group][rows, box.granule_slice] = True
        by_rows = chain.from_iterable(map(_boxes, marked))
        if room < 0 or len(list(islice(by_rows, len(boxes) + 1))) > len(boxes):
            raise UsageError(
                f"landed: {len(boxes)} boxes overlap or do not follow rows"
            )
        for box in boxes:
            self.mark(box)

    def has(self, segment: Segment) -> bool:
        """Return whether every byte of a segment has landed."""
        return bool(self._cells(segment).all())

    def boxes(self, most: int) -> list[Segment]:
        """Return the landed parts as at most ``most`` segments."""
        found = (
            Segment(index, walk.layers.start + top, layers, left, granules)
            for index, walk in enumerate(self.plan.groups)
            for top, layers, left, granules in _boxes(self._all_cells(index))
        )
        return list(islice(found, most))

    def lacking(self, segment: Segment) -> list[Segment]:
        """Return the parts of a segment that have not landed.

        Cells that the consumer had before are included if that reduces the number of
        parts, since they are never sent anyway.
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
        """Return the number of cells that have not landed."""
        return sum(cells.left for cells in self._groups)

    @property
    def complete(self) -> bool:
        """Return whether everything has landed."""
        return all(map(_COMPLETE, self._groups))

    @property
    def layers(self) -> int:
        """Return how many layers, in all groups, landed for every block."""
        return sum(cells.whole_layers.bit_count() for cells in self._groups)

    @property
    def nbytes(self) -> int:
        """Return the landed payload bytes, without the bytes held before."""
        return sum(
            (cells.blocks_of(layer) & moving).bit_count() * part.granule_bytes
            for part, cells, moving in zip(
                self.plan.maps, self._groups, self._moving, strict=True
            )
            for layer in range(len(part.walk.layers))
        )

    def layer(self, layer: int, group: str | None = None) -> bool:
        """Return whether a layer, by the model's index, has landed for every block.

        A layer that the transfer does not carry counts as landed.
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
        """Return for each layer and local block whether it landed."""
        cells = self._all_cells(group)
        per_block = self.plan.maps[group].granules_per_block
        blocks = self.plan.lists[self.plan.groups[group].group].size
        # The last block may extend beyond the last granule, and nothing has to land
        # there.
        padded = np.ones((cells.shape[0], blocks * per_block), np.bool_)
        padded[:, : cells.shape[1]] = cells
        whole: Bits = np.logical_and.reduce(
            padded.reshape(cells.shape[0], blocks, per_block), axis=2
        )
        return whole

    def blocks(self, group: int) -> Bits:
        """Return for each local block whether it landed in every layer."""
        whole: Bits = np.logical_and.reduce(self.by_layer(group), axis=0)
        return whole

    @property
    def usable_tokens(self) -> int:
        """Return the number of usable leading tokens; see :func:`common_tokens`."""
        tokens = [walk.tokens for walk in self.plan.groups]
        states = any(g.spec.kind == "state" for g in self.plan.local.groups)
        leading = map(self._leading_tokens, range(len(tokens)))
        return common_tokens(tokens, leading, self.complete, states)

    @property
    def usable_prefix(self) -> int:
        """Return the number of leading blocks that :attr:`usable_tokens` fill.

        With several groups, blocks of the group that has the most tokens count.
        """
        tokens = [walk.tokens for walk in self.plan.groups]
        longest = tokens.index(max(tokens))
        group = self.plan.local.groups[longest]
        usable = self.usable_tokens
        if usable == tokens[longest]:
            return group.blocks
        return usable // group.spec.block_tokens

    def _leading_tokens(self, group: int) -> int:
        block_tokens = self.plan.local.groups[group].spec.block_tokens
        tokens = self.plan.groups[group].tokens
        return leading_tokens(self.blocks(group), block_tokens, tokens)

    def _cells(self, segment: Segment) -> Bits:
        """Return a segment's cells, of shape (layers, granules)."""
        self.plan.check(segment)
        top = segment.layer - self.plan.groups[segment.group].layers.start
        rows = self._groups[segment.group].cells(range(top, top + segment.layers))
        return rows[:, segment.granule_slice]

    def _all_cells(self, group: int) -> Bits:
        return self._groups[group].cells(range(len(self.plan.groups[group].layers)))


def leading_tokens(landed: Bits, block_tokens: int, tokens: int) -> int:
    """Return how many of a group's leading tokens landed, at most ``tokens``."""
    leading = landed.size if landed.all() else int(landed.argmin())
    return min(leading * block_tokens, tokens)


def common_tokens(
    tokens: Collection[int], leading: Iterable[int], complete: bool, states: bool
) -> int:
    """Return how many leading tokens landed in every layer and group.

    A group with fewer tokens than another is a window: it holds only the last tokens.
    If some of them are missing, the tokens before cannot be used either, because their
    own window was not transferred. So with a window, an incomplete transfer has no
    usable tokens. The same is true for a recurrent state.

    Args:
        tokens: The number of tokens in each group's list.
        leading: How many of these landed from the beginning on.
        complete: Whether everything has landed.
        states: Whether a group holds recurrent states.
    """
    if states or len(set(tokens)) > 1:
        return max(tokens) if complete else 0
    return min(leading)


def _boxes(cells: Bits) -> Iterator[tuple[int, int, int, int]]:
    """Yield the set cells as boxes: (row, rows, column, columns).

    There is one box per run of columns, and adjacent equal rows share boxes. So layers
    that landed one after the other form a single box.
    """
    if not cells.size:
        return
    steps = np.flatnonzero((cells[1:] != cells[:-1]).any(axis=1)) + 1
    for top, end in pairwise([0, *steps.tolist(), cells.shape[0]]):
        row = np.concatenate(([False], cells[top], [False]))
        edges = np.flatnonzero(row[1:] != row[:-1]).tolist()
        for left, right in zip(edges[::2], edges[1::2], strict=True):
            yield top, end - top, left, right - left
