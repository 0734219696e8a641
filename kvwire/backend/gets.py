"""Turns a batch of a window's blocks into gets, for transports that read ranges.

First the bytes are read, in as few gets as possible: pieces that are adjacent on both
sides are joined, and a piece outside of the exposed memory is left out, with its block.
*Once all of these gets have ended*, the generations are read: entries of the table that
lie close together are read as one range, into the reader's own memory.

All of it is NumPy: no Python code runs per piece or block.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from kvwire.backend.window import BlockRead, WindowMemory
from kvwire.kv.blocks import Bits
from kvwire.kv.fragments import Array

ENTRY_BYTES: Final = 8
# Entries separated by fewer bytes than this are read as one range, including the gap: a
# get costs as much as copying some 16 KiB.
GAP_BYTES: Final = 16 * 1024
# No process has addresses beyond this, and no sum of an address and a size overflows 64
# bits.
_ADDRESS_MAX: Final = 2**62
Places = npt.NDArray[np.int64]

_ENTRY: Final = np.uint64(ENTRY_BYTES)
_GAP: Final = np.uint64(GAP_BYTES // ENTRY_BYTES)
_ONE: Final = np.uint64(1)


class Gets(NamedTuple):
    """Ranges to read; the arrays have one item for each get.

    Attributes:
        ranges: The number of the exposed range that contains it.
        there: The address in the peer's process.
        here: The address in this process.
        lengths: The number of bytes.
    """

    ranges: Places
    there: Array
    here: Array
    lengths: Array

    def __len__(self) -> int:
        """Return the number of gets."""
        return self.there.size


class Looks(NamedTuple):
    """The gets that read a batch's generations.

    Attributes:
        gets: The ranges of the table, into ``memory``.
        memory: Receives these ranges, one after the other.
        places: The position of each block's generation in ``memory``.
    """

    gets: Gets
    memory: Array
    places: Array


@final
class WindowRanges:
    """A window's memory as ranges, in the same order on both sides.

    The tensors and the table are sorted by address, and adjacent ones are joined. So a
    contiguous cache is one range, with one key.

    Attributes:
        places: The address and the bytes of each range.

    Raises:
        ValueError: An address or a size is not a valid one.
    """

    def __init__(self, memory: WindowMemory) -> None:
        for place in (*memory.spans, memory.table):
            if not 0 <= min(place) <= max(place) < _ADDRESS_MAX:
                raise ValueError("{1} bytes at {0:#x}".format(*place))
        self.places: list[tuple[int, int]] = _joined([*memory.spans, memory.table])
        self._starts = np.array([start for start, _ in self.places], np.uint64)
        self._sizes = np.array([nbytes for _, nbytes in self.places], np.uint64)
        table, nbytes = memory.table
        self._table = np.uint64(table)
        self._table_range = int(self._starts.searchsorted(self._table, "right")) - 1
        self._entries = nbytes // ENTRY_BYTES

    def gets(self, batch: BlockRead) -> tuple[Gets, Bits]:
        """Return the gets of a batch, and the blocks that they read."""
        good = batch.entries < self._entries
        offsets_from = batch.offsets_from
        offsets_to = batch.offsets_to
        run = np.uint64(batch.run)
        # Pieces come first, since within a tensor neighbouring blocks are adjacent.
        there = np.add.outer(batch.pieces_from, offsets_from)
        ranges, inside = self._holding(there, run)
        if not (inside.all() and good.all()):
            whose = np.arange(offsets_from.size) // batch.per_block
            good[whose[~inside.all(axis=0)]] = False
            wanted = good[whose]
            offsets_to = offsets_to[wanted]
            there = there[:, wanted]
            ranges = ranges[:, wanted]
        here = np.add.outer(batch.pieces_to, offsets_to).ravel()
        return _merged(ranges.ravel(), there.ravel(), here, run), good

    def looks(self, entries: Array) -> Looks:
        """Return the gets for these entries of the table, which must be within it."""
        if not entries.size:
            return self._looks(entries, entries, entries)
        lowest = entries.min()
        count = entries.max() - lowest + _ONE
        if count <= _GAP:
            firsts = np.array((lowest,), np.uint64)
            counts = np.array((count,), np.uint64)
            return self._looks(firsts, counts, entries - lowest)
        order = entries.argsort()
        ordered = entries[order]
        begins = np.ones(entries.size, np.bool_)
        np.greater(ordered[1:] - ordered[:-1], _GAP, out=begins[1:])
        firsts = ordered[begins]
        counts = ordered[np.append(begins[1:], True)] - firsts + _ONE
        starts = counts.cumsum() - counts
        which = begins.cumsum() - 1
        places = np.empty(entries.size, np.uint64)
        places[order] = ordered - firsts[which] + starts[which]
        return self._looks(firsts, counts, places)

    def _looks(self, firsts: Array, counts: Array, places: Array) -> Looks:
        """Return the gets for ranges of the table, given by first entry and count."""
        ends = counts.cumsum(dtype=np.uint64)
        memory = np.empty(int(ends[-1]) if ends.size else 0, np.uint64)
        here = np.uint64(memory.__array_interface__["data"][0])
        gets = Gets(
            np.full(firsts.size, self._table_range),
            self._table + firsts * _ENTRY,
            here + (ends - counts) * _ENTRY,
            counts * _ENTRY,
        )
        return Looks(gets, memory, places)

    def _holding(self, there: Array, nbytes: np.uint64) -> tuple[Places, Bits]:
        """Return each address's range, and whether all its bytes are in that range."""
        limits = np.where(
            self._sizes >= nbytes, self._sizes - nbytes + _ONE, np.uint64(0)
        )
        # An address before its range wraps around, and so exceeds every limit.
        if self._starts.size == 1:
            ranges = np.zeros(there.shape, np.int64)
            return ranges, there - self._starts < limits
        ranges = np.maximum(self._starts.searchsorted(there, "right"), 1) - 1
        return ranges, there - self._starts[ranges] < limits[ranges]


def _merged(ranges: Places, there: Array, here: Array, run: np.uint64) -> Gets:
    """Join pieces of ``run`` bytes that are adjacent on both sides, within a range."""
    count = there.size
    touch = there[1:] - there[:-1] == run
    if not touch.any():
        return Gets(ranges, there, here, np.full(count, run))
    touch &= here[1:] - here[:-1] == run
    touch &= ranges[1:] == ranges[:-1]
    firsts = np.flatnonzero(np.append(True, ~touch))
    counts = np.diff(firsts, append=count).astype(np.uint64)
    return Gets(ranges[firsts], there[firsts], here[firsts], counts * run)


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, nbytes in sorted(span for span in spans if span[1]):
        if joined and start <= sum(joined[-1]):
            before, its = joined[-1]
            joined[-1] = (before, max(its, start + nbytes - before))
        else:
            joined.append((start, nbytes))
    return joined
