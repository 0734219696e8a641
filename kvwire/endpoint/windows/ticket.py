"""Tickets: blocks offered by a window, with their generations, as bytes.

A ticket is a permission, because a generation is a random number that only an offer
reveals. It may arrive through any channel, even in an API client's request, so
everything in it is checked::

    magic        4 bytes   b"kvw1"
    serial       16 bytes  the window's, new each time one is made
    groups       u32
    counts       u32 each  the blocks of each group, in the cache's order
    padding                to a multiple of 8
    generations  u64 each  of the blocks of all groups
    entries      u32 each  their places in the window's table of generations

All numbers are little-endian. The blocks of one group have consecutive entries in the
table; each group begins where the previous one ends.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvwire.errors import UsageError
from kvwire.kv.blocks import Ids, any_of
from kvwire.kv.fragments import Array
from kvwire.limits import KV_BLOCKS_MAX, KV_GROUPS_MAX

SERIAL_BYTES: Final = 16
_MAGIC: Final = b"kvw1"
_HEAD: Final = struct.Struct(f"<4s{SERIAL_BYTES}sI")
_U4: Final = np.dtype("<u4")
_U8: Final = np.dtype("<u8")
_BLOCK_BYTES: Final = _U4.itemsize + _U8.itemsize


class Ticket(NamedTuple):
    """A ticket that was read.

    Attributes:
        serial: The window's serial.
        counts: The number of blocks in each group.
        entries: Each block's place in the window's table.
        generations: Each block's generation.
    """

    serial: bytes
    counts: tuple[int, ...]
    entries: Ids
    generations: Array

    def at(self, positions: slice | Sequence[int] | npt.NDArray[np.integer]) -> Ticket:
        """Return a ticket for some of its blocks, given their positions in it.

        Raises:
            UsageError: It has several groups, a position is negative or out of range,
                or they are no integers.
        """
        if len(self.counts) != 1:
            raise UsageError(
                "positions: the ticket has several groups; split it by group first"
            )
        chosen = positions if isinstance(positions, slice) else _places(positions)
        # NumPy would count it from the end, and another block would be read.
        if not isinstance(chosen, slice) and any_of(chosen < 0):
            raise UsageError(
                f"positions: {chosen.min()} is negative; pass positions from 0, or a "
                "slice such as slice(-1, None)"
            )
        try:
            entries = self.entries[chosen]
        except (IndexError, TypeError) as exc:
            raise UsageError(f"positions: {exc}") from None
        generations = self.generations[chosen]
        return Ticket(self.serial, (entries.size,), entries, generations)


def _places(positions: object) -> Ids:
    with suppress(TypeError, ValueError, OverflowError):
        places = np.asarray(positions)
        if places.ndim == 1 and not places.size:
            return places.astype(np.int64)  # an empty list has no type
        # NumPy would take booleans as a mask.
        if places.ndim == 1 and places.dtype.kind in "iu":
            return places
    raise UsageError(
        f"positions={positions!r:.80}: pass a list of integers, or a slice"
    )


def write_ticket(
    serial: bytes, counts: Sequence[int], entries: Ids, generations: Array
) -> bytes:
    """Return a ticket as bytes."""
    head = _HEAD.pack(_MAGIC, serial, len(counts)) + struct.pack(
        f"<{len(counts)}I", *counts
    )
    head += bytes(-len(head) % _U8.itemsize)
    # Joined at once: a ticket of many blocks has megabytes, and each copy of it would
    # hold the loop for a millisecond.
    columns = generations.astype(_U8, copy=False), entries.astype(_U4)
    return b"".join((head, *(np.ascontiguousarray(one).data for one in columns)))


def read_ticket(ticket: object) -> Ticket:
    """Read a ticket.

    Raises:
        UsageError: It is not a ticket, or incomplete.
    """
    if not isinstance(ticket, bytes | bytearray | memoryview):
        raise UsageError(
            f"ticket: {type(ticket).__name__}; pass the bytes that offer returned"
        )
    size = len(ticket)
    if size < _HEAD.size:
        raise UsageError(f"ticket: {size} bytes are too few for a ticket")
    magic, serial, groups = _HEAD.unpack_from(ticket)
    if magic != _MAGIC or not 1 <= groups <= KV_GROUPS_MAX:
        raise UsageError(
            "ticket: these bytes are not a ticket, or come from another version"
        )
    begin = _HEAD.size + _U4.itemsize * groups
    begin += -begin % _U8.itemsize
    if size < begin:
        raise UsageError(
            f"ticket: it has {size} bytes, but its blocks begin at byte {begin}"
        )
    counts = struct.unpack_from(f"<{groups}I", ticket, _HEAD.size)
    total = sum(counts)
    if not 0 < total <= KV_BLOCKS_MAX or size != begin + _BLOCK_BYTES * total:
        raise UsageError(f"ticket: {size} bytes do not fit {total} blocks")
    generations = np.frombuffer(ticket, _U8, total, begin)
    entries = np.frombuffer(ticket, _U4, total, begin + _U8.itemsize * total)
    return Ticket(serial, counts, entries.astype(np.int64), generations)
