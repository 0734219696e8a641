"""The content that the checks send, and the memory of senders and receivers.

A header contains its frame's number and length, and a digest of both. A payload has the
content that :mod:`kvwire_certify.oracle` writes in the life with that number. So a
receiver detects from the frame alone whether it was lost, duplicated, moved, mixed with
another, truncated or changed.
"""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvwire.backend import Payload
from kvwire.kv.fragments import Fragments
from kvwire.limits import HEADER_BYTES, KIB
from kvwire_certify.oracle import content

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
Cut = Callable[[int], list[int]]
"""Divides a total number of bytes into the lengths of fragments."""

_HEADER: Final = struct.Struct("<QQ16s")
assert _HEADER.size == HEADER_BYTES
# Fills the gaps around and between the pieces of a payload, and must stay intact.
_CANARY: Final = 0x5A
_GAP_BYTES: Final = 3
# Overwrites memory that was given back to its owner.
_POISON: Final = 0xEE
# Slicing costs about as much time as indexing this many bytes.
_SLICE_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Head:
    """The content of a header."""

    number: int
    length: int

    def encode(self) -> bytes:
        """Return the header."""
        return _HEADER.pack(self.number, self.length, self._digest())

    @classmethod
    def decode(cls, header: memoryview) -> Head | None:
        """Decode a header; None if :meth:`encode` did not make it."""
        if header.nbytes != HEADER_BYTES:
            return None
        number, length, digest = _HEADER.unpack(header)
        head = cls(number, length)
        return head if head._digest() == digest else None

    def _digest(self) -> bytes:
        said = struct.pack("<QQ", self.number, self.length)
        return hashlib.blake2b(said, digest_size=16).digest()


def pattern(number: int, length: int) -> Bytes:
    """Make the payload of frame ``number``."""
    return np.frombuffer(content(length, number), np.uint8)


# --- how memory is cut ----------------------------------------------------------------


def even(size: int) -> Cut:
    """Return a function that cuts a length into pieces of one size and a rest."""

    def cut(total: int) -> list[int]:
        whole, rest = divmod(total, size)
        return [size] * whole + [rest] * (rest > 0)

    return cut


def _uneven(total: int) -> list[int]:
    """Cut a length into pieces of 1 byte to 9 KiB, in irregular order."""
    lengths = []
    step = 1
    while total:
        step = step * 37 % 9209
        lengths.append(min(total, step + 1))
        total -= lengths[-1]
    return lengths


CUTS: Final[dict[str, Cut | None]] = {
    "view": None,
    "one-fragment": lambda total: [total] if total else [],
    "pages": even(4 * KIB),
    "odd-pages": even(4093),
    "thousands": even(61),
    "uneven": _uneven,
}
"""The ways to divide a payload's memory; None is a view."""


class Memory:
    """The memory of one payload: a view, or pieces in reverse order with gaps."""

    def __init__(self, nbytes: int, cut: Cut | None = None) -> None:
        self.nbytes = nbytes
        lengths = np.array(cut(nbytes) if cut else [nbytes], np.int64)
        # In reverse order: the last piece of the payload is the first in memory. There
        # are gaps before that piece and after each piece.
        ends = np.cumsum(lengths[::-1] + _GAP_BYTES)[::-1]
        self._offsets = ends - lengths
        self._lengths = lengths
        self._arena = np.full(
            nbytes + (lengths.size + 1) * _GAP_BYTES, _CANARY, np.uint8
        )
        self.payload: Payload
        if cut is None:
            self.payload = self._arena[_GAP_BYTES : _GAP_BYTES + nbytes].data
        else:
            self.payload = self._fragments(self._offsets, lengths)

    def _fragments(self, offsets: Places, lengths: Places) -> Fragments:
        # Nothing but `owner` keeps the arena alive.
        return Fragments(
            (self._arena.ctypes.data + offsets).astype(np.uint64),
            lengths.astype(np.uint64),
            owner=self._arena,
            writable=True,
        )

    @property
    def alive(self) -> weakref.ref[Bytes]:
        """A weak reference, dead once nothing holds the memory."""
        return weakref.ref(self._arena)

    def split_in_place(self, count: int) -> None:
        """Turn a view into adjacent fragments of equal length."""
        size = self.nbytes // count
        offsets = self._offsets[0] + np.arange(count) * size
        self.payload = self._fragments(offsets, np.full(count, size))

    def fill(self, data: Bytes) -> None:
        """Write the payload's bytes."""
        if self._short_pieces:
            self._arena[self._index] = data
            return
        for piece, place in self._pieces():
            piece[:] = data[place]

    def poison(self) -> None:
        """Overwrite all bytes and gaps, as the memory's next user would."""
        self._arena[:] = _POISON

    @property
    def untouched(self) -> bool:
        """Whether every byte is still as :meth:`poison` wrote it."""
        return bool((self._arena == _POISON).all())

    def differs_at(self, data: Bytes) -> int | None:
        """Return the first position where the payload and `data` differ, or None."""
        if self._short_pieces:
            different = self._arena[self._index] != data
            return int(different.argmax()) if different.any() else None
        for piece, place in self._pieces():
            if not np.array_equal(piece, data[place]):
                return int(place.start + np.flatnonzero(piece != data[place])[0])
        return None

    def gaps_are_whole(self) -> bool:
        """Return whether the gaps beside the payload are unchanged."""
        behind = self._arena[self._ends[:, None] + np.arange(_GAP_BYTES)]
        first = self._arena[:_GAP_BYTES]
        return bool((first == _CANARY).all() and (behind == _CANARY).all())

    def _pieces(self) -> Iterator[tuple[Bytes, slice]]:
        """Yield each piece of memory, and its slice of the payload."""
        start = 0
        for offset, end in zip(
            self._offsets.tolist(), self._ends.tolist(), strict=True
        ):
            yield self._arena[offset:end], slice(start, start + end - offset)
            start += end - offset

    @property
    def _ends(self) -> Places:
        return self._offsets + self._lengths

    @property
    def _short_pieces(self) -> bool:
        """Whether indexing each byte is cheaper than slicing each piece."""
        return self._lengths.size * _SLICE_BYTES > self.nbytes

    @cached_property
    def _index(self) -> Places:
        """Return the arena position of each byte of the payload."""
        starts = np.cumsum(self._lengths) - self._lengths
        shifts = np.repeat(self._offsets - starts, self._lengths)
        return shifts + np.arange(self.nbytes, dtype=np.int64)


class Owned(Protocol):
    """An object with the memory of one payload, such as a token or a landing."""

    memory: Memory | None


def poison(owned: Owned) -> None:
    """Overwrite memory that its owner has got back, as if a KV block were reused."""
    if owned.memory is not None:
        owned.memory.poison()
