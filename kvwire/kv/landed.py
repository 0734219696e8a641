"""What of a transfer has landed: one bit for each layer and granule.

A segment lands whole once all of its chunks were verified, which sets its cells at
once. Of a segment that never became whole, the cells that no missing byte range touches
have landed too; the rest have not. Marking is idempotent, so a chunk that comes again
after a reconnect changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise

import numpy as np
import numpy.typing as npt

from kvwire.errors import UsageError
from kvwire.kv.blocks import Bits
from kvwire.kv.plan import Segment, TransferPlan


class Landed:
    """Keeps the landed cells of one transfer, seen from one side.

    What the consumer had before counts as landed, if ``held``.
    """

    def __init__(self, plan: TransferPlan, *, held: bool = True) -> None:
        self.plan: TransferPlan = plan
        self._cells: list[Bits] = []
        self._left: list[npt.NDArray[np.int64]] = []
        for index, walk in enumerate(plan.groups):
            if plan.maps[index].moves_all:
                shape = len(walk.layers), walk.granules
                self._cells.append(np.zeros(shape, np.bool_))
                left = np.empty(shape[0], np.int64)
                left.fill(walk.granules)
                self._left.append(left)
                continue
            here = ~plan.maps[index].wanted & held
            cells = np.repeat(here[None, :], len(walk.layers), axis=0)
            self._cells.append(cells)
            self._left.append(np.count_nonzero(~cells, axis=1))

    def mark(self, segment: Segment) -> None:
        """Note that every byte of a segment has landed."""
        part, left = self._views(segment)
        left -= part.shape[1] - np.add.reduce(part, axis=1)
        part.fill(True)

    def claim(self, segment: Segment) -> bool:
        """Mark a segment; False, and nothing, if a byte that moves in it was marked."""
        part, left = self._views(segment)
        moving, group_map = part, self.plan.maps[segment.group]
        if not group_map.moves_all:
            moving = part & group_map.wanted[segment.granule_slice]
        if np.logical_or.reduce(moving, axis=None):
            return False
        left -= part.shape[1] - np.add.reduce(part, axis=1)
        part.fill(True)
        return True

    def mark_granules(self, group: int, granules: Bits) -> None:
        """Note granules of a group landed in every layer: (granules,)."""
        self._cells[group][:, granules] = True
        self._left[group][:] = np.count_nonzero(~self._cells[group], axis=1)

    def mark_but(self, segment: Segment, missing: Iterable[tuple[int, int]]) -> None:
        """Note that every byte of a segment has landed but some (offset, bytes)."""
        part, left = self._views(segment)
        whole = np.ones_like(part)
        for offset, nbytes in missing:
            whole &= ~self.plan.touched(segment, offset, nbytes)
        left -= (whole & ~part).sum(axis=1)
        part |= whole

    def mark_boxes(self, boxes: Sequence[Segment]) -> None:
        """Note what a peer says has landed, as :meth:`boxes` returns it.

        Boxes that overlap are refused, and more of them than whole rows would need: to
        find what they leave out must cost no more than to read them.
        """
        if not boxes:
            return
        told = [np.zeros_like(cells) for cells in self._cells]
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
        return bool(self._views(segment)[0].all())

    def boxes(self, most: int) -> list[Segment]:
        """Return what has landed as segments, ``most`` of them at most."""
        found = (
            Segment(index, walk.layers.start + top, layers, left, granules)
            for index, walk in enumerate(self.plan.groups)
            for top, layers, left, granules in _boxes(self._cells[index])
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
            for top, layers, left, granules in _boxes(~self._views(segment)[0] | held)
        ]

    @property
    def left(self) -> int:
        """Return how many cells have not landed."""
        return sum([int(np.add.reduce(left)) for left in self._left])

    @property
    def complete(self) -> bool:
        """Tell whether everything has landed."""
        return not any(map(np.logical_or.reduce, self._left))

    @property
    def layers(self) -> int:
        """Return how many layers of every block have landed, over all groups."""
        return sum(int(np.count_nonzero(left == 0)) for left in self._left)

    @property
    def nbytes(self) -> int:
        """Return how many payload bytes have landed, without what was there before."""
        moved = (
            np.count_nonzero(cells if part.moves_all else cells[:, part.wanted])
            * part.granule_bytes
            for part, cells in zip(self.plan.maps, self._cells, strict=True)
        )
        return int(sum(moved))

    def layer(self, layer: int, group: str | None = None) -> bool:
        """Tell whether a layer, by the model's index, of every block has landed.

        One that the transfer does not carry is not waited for.
        """
        groups = range(len(self.plan.groups))
        if group is not None:
            groups = range(index := self.plan.group_index(group), index + 1)
        for index in groups:
            layers = self.plan.groups[index].layers
            if layer in layers and self._left[index][layer - layers.start]:
                return False
        return True

    def by_layer(self, group: int) -> Bits:
        """Return which layers of which local blocks landed: (layers, blocks)."""
        cells = self._cells[group]
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

    def _views(self, segment: Segment) -> tuple[Bits, npt.NDArray[np.int64]]:
        """Return the cells of a segment, and how many are left of each layer."""
        group, granule = segment.group, segment.granule
        if not 0 <= group < len(self._cells):
            self.plan.check(segment)  # which says what is outside, here and below
        cells = self._cells[group]
        top = segment.layer - self.plan.groups[group].layers.start
        end, last = top + segment.layers, granule + segment.granules
        layers, granules = cells.shape
        if not (0 <= top < end <= layers and 0 <= granule < last <= granules):
            self.plan.check(segment)
        return cells[top:end, granule:last], self._left[group][top:end]


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
