"""The pieces of a window's granules with their bounds, computed once for many batches.

Addresses from the peer are checked here: a piece is read only inside its tensor, and a
tensor only in the memory that the caller has allowed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvwire.backend import BlockRead
from kvwire.errors import ProtocolError
from kvwire.kv.blocks import Bits
from kvwire.kv.fragments import Array
from kvwire.memory.generations import ENTRY_BYTES
from kvwire_local.descriptor import RULE

# A window needs one for each group of blocks and each cache into which it is read.
_TEMPLATES_MAX: Final = 64
# The struct `kvwire_window` of _copy.c.
_WINDOW: Final = struct.Struct("=8Q")
# No process has addresses beyond this, so the sum of two does not overflow 64 bits.
_ADDRESS_MAX: Final = 2**63
_WRAP: Final = 2**64

Span = tuple[int, int]
"""The first address of some memory, and the address after its last byte."""


class WindowTemplate:
    """The pieces of a granule, and the tensors that may contain them.

    Attributes:
        packed: The template for the compiled functions.
        pieces: The arrays that it was computed for.
    """

    def __init__(self, batch: BlockRead, tensors: _Tensors) -> None:
        pieces = batch.pieces_from
        run = np.uint64(batch.run)
        # For each piece, the last tensor that does not begin after it.
        index = tensors.first.searchsorted(pieces, "right") - 1
        first = tensors.first[index]
        end = tensors.end[index]
        inside = np.logical_and(index >= 0, pieces + run <= end)
        self._origin: Array = pieces + tensors.shift[index]
        self._target: Array = batch.pieces_to
        self._low: Array = first + tensors.shift[index]
        # The number of places in its tensor at which a piece may lie.
        self._room: Array = np.where(
            inside, end - first - run + np.uint64(1), np.uint64(0)
        )
        self._entries = tensors.entries
        self.pieces = (batch.pieces_from, batch.pieces_to)
        columns = (self._origin, self._target, self._low, self._room)
        for column in columns:
            # Not an assert: compiled functions read them by their addresses.
            alike = column.dtype == np.uint64 and column.size == pieces.size
            if not (alike and column.flags.c_contiguous):
                raise ValueError(f"pieces of {column.dtype}, {column.size}")
        self.packed: bytes = _WINDOW.pack(
            *(column.ctypes.data for column in columns),
            pieces.size,
            batch.run,
            tensors.table,
            tensors.entries,
        )

    def inside(self, batch: BlockRead) -> Bits:
        """Return which blocks have an entry and lie inside the tensors."""
        inside = batch.entries < np.uint64(self._entries)
        places = batch.offsets_from[:, np.newaxis] + (self._origin - self._low)
        granules = np.logical_and.reduce(places < self._room, axis=1)
        firsts = np.arange(0, granules.size, batch.per_block)
        if firsts.size:
            inside &= np.logical_and.reduceat(granules, firsts)
        return inside

    def addresses(self, batch: BlockRead, chosen: Bits) -> tuple[Array, Array]:
        """Return the source and target addresses of the chosen blocks' pieces."""
        granules = np.repeat(chosen, batch.per_block)[: batch.offsets_from.size]
        origin = batch.offsets_from[granules, np.newaxis] + self._origin
        target = batch.offsets_to[granules, np.newaxis] + self._target
        return origin.ravel(), target.ravel()


class WindowTemplates:
    """The templates of one window.

    Args:
        spans: The owner's addresses of the tensors; from :func:`checked_spans`.
        shifts: For each tensor, the offset to the address at which it is read.
        table: The address at which the table of generations is read.
        entries: The number of its entries.
    """

    def __init__(
        self, spans: Sequence[Span], shifts: Sequence[int], table: int, entries: int
    ) -> None:
        self.table = table
        self.entries = entries
        self._tensors = _Tensors(spans, shifts, table, entries)
        self._made: dict[tuple[int, int, int], WindowTemplate] = {}

    def of(self, batch: BlockRead) -> WindowTemplate:
        """Return the template for a batch."""
        granules = batch.offsets_from.size
        blocks = batch.entries.size
        # Not asserts: compiled functions read as many numbers of each column.
        if (
            batch.offsets_to.size != granules
            or batch.generations.size != blocks
            or blocks != -(-granules // batch.per_block)
        ):
            raise ValueError(
                f"{granules} and {batch.offsets_to.size} offsets, "
                f"{batch.generations.size} generations of {blocks} blocks"
            )
        key = (id(batch.pieces_from), id(batch.pieces_to), batch.run)
        made = self._made.get(key)
        if made is None:
            if len(self._made) >= _TEMPLATES_MAX:
                self._made.clear()
            made = WindowTemplate(batch, self._tensors)
            self._made[key] = made  # bounded: _TEMPLATES_MAX
        return made


class _Tensors:
    """A window's tensors as arrays, in the order of their addresses."""

    def __init__(
        self, spans: Sequence[Span], shifts: Sequence[int], table: int, entries: int
    ) -> None:
        # The last one has no memory; an index of -1 refers to it.
        columns = np.array(
            [(*span, shift % _WRAP) for span, shift in zip(spans, shifts, strict=True)]
            + [(_WRAP - 1, 0, 0)],
            np.uint64,
        )
        self.first, self.end, self.shift = np.ascontiguousarray(columns.T)
        self.table = table
        self.entries = entries


def checked_spans(spans: Sequence[tuple[int, int]]) -> list[Span]:
    """Return a peer's tensors by address; overlapping ones are merged.

    Raises:
        ProtocolError: One is empty, or beyond the end of memory.
    """
    checked: list[Span] = []
    for first, nbytes in sorted(spans):
        end = first + nbytes
        if first < 0 or nbytes < 1 or end > _ADDRESS_MAX:
            raise ProtocolError(
                RULE, f"local: no exposed memory contains {nbytes} bytes at {first:#x}"
            )
        if checked and first < checked[-1][1]:
            checked[-1] = (checked[-1][0], max(end, checked[-1][1]))
        else:
            checked.append((first, end))
    return checked


def checked_table(table: tuple[int, int]) -> Span:
    """Return the place of a peer's table of generations.

    Raises:
        ProtocolError: It is not a table of aligned 64-bit numbers.
    """
    ((first, end),) = checked_spans((table,))
    if first % ENTRY_BYTES or end % ENTRY_BYTES:
        raise ProtocolError(
            RULE,
            f"local: generations must be aligned {ENTRY_BYTES}-byte numbers, not "
            f"{table[1]} bytes at {first:#x}",
        )
    return first, end


def arguments(batch: BlockRead) -> tuple[bytes, bytes, int, int, bytes, bytes, int]:
    """Return a batch as arguments of the compiled functions."""
    return (
        batch.offsets_from.tobytes(),
        batch.offsets_to.tobytes(),
        batch.offsets_from.size,
        batch.per_block,
        batch.entries.tobytes(),
        batch.generations.tobytes(),
        batch.entries.size,
    )
