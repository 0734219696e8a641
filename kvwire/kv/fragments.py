"""A byte stream as a list of contiguous pieces of memory.

A transfer has one canonical byte order, which each side maps onto its own memory with a
list of fragments. The two lists may be cut differently; only their total lengths must
be equal. A list is a pair of NumPy arrays, so 100,000 fragments need two arrays instead
of 100,000 objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.errors import UsageError
from kvwire.kv.blocks import Bits, Ids
from kvwire.types import Device

UINT64: Final = np.dtype(np.uint64)
Array = npt.NDArray[np.uint64]
_new: Final = object.__new__


class Fragments:
    """Contiguous pieces of one side's memory, in canonical order.

    Attributes:
        addresses: Shape (n,), uint64: the address of each fragment.
        lengths: Shape (n,), uint64: the length of each fragment, at least 1.
        starts: Shape (n + 1,), uint64: where each fragment begins in the stream; the
            last entry is the total.
        nbytes: Total bytes.
        owner: An object that keeps the memory alive.
        writable: Whether the memory may be written to.
        device: The device that the addresses belong to; None for host memory. Host code
            must not access a device's addresses.
    """

    __slots__ = (
        "addresses",
        "device",
        "lengths",
        "nbytes",
        "owner",
        "starts",
        "writable",
    )

    def __init__(
        self,
        addresses: Array,
        lengths: Array,
        *,
        owner: object,
        writable: bool,
        device: Device | None = None,
        starts: Array | None = None,
    ) -> None:
        """Check the arrays, unless ``starts`` shows that they are valid."""
        if starts is None:
            _check(addresses, lengths)
            starts = np.zeros(lengths.size + 1, np.uint64)
            lengths.cumsum(out=starts[1:])
        self.addresses: Array = addresses
        self.lengths: Array = lengths
        self.starts: Array = starts
        self.nbytes: int = starts.item(-1)
        self.owner: object = owner
        self.writable: bool = writable
        self.device: Device | None = device

    @classmethod
    def uniform(
        cls,
        addresses: Array,
        length: int,
        *,
        owner: object,
        writable: bool,
        device: Device | None = None,
    ) -> Fragments:
        """Return fragments of one length, at least 1, and join adjacent ones."""
        count = addresses.size
        lengths, starts = columns_of(count, length)
        touches = addresses[1:] == addresses[:-1] + np.uint64(length)
        made = cls(
            addresses,
            lengths,
            owner=owner,
            writable=writable,
            device=device,
            starts=starts,
        )
        return made.merged() if np.logical_or.reduce(touches) else made

    def __len__(self) -> int:
        """Return the number of fragments."""
        return self.lengths.size

    def __repr__(self) -> str:
        return f"Fragments({len(self)} of {self.nbytes} bytes)"

    def slice(self, offset: int, length: int) -> Fragments:
        """Return the bytes ``[offset, offset + length)`` as fragments."""
        if offset < 0 or length < 0 or offset > self.nbytes - length:
            raise UsageError(
                f"fragments: the range {offset}+{length} is outside the stream of "
                f"{self.nbytes} bytes"
            )
        if length == self.nbytes:
            return self
        if length == 0:
            empty = np.empty(0, np.uint64)
            return self._part(empty, empty)
        # This runs once per chunk, so the checks and the running sum are not repeated.
        starts = self.starts
        first = int(starts.searchsorted(np.uint64(offset), "right")) - 1
        last = int(starts.searchsorted(np.uint64(offset + length), "left"))
        before = offset - starts.item(first)
        after = starts.item(last) - (offset + length)
        addresses = self.addresses[first:last]
        lengths = self.lengths[first:last]
        starts = starts[first : last + 1] - starts[first]
        if before or after:
            addresses = addresses.copy()
            lengths = lengths.copy()
            addresses[0] += np.uint64(before)
            lengths[0] -= np.uint64(before)
            lengths[-1] -= np.uint64(after)
            starts[1:] -= np.uint64(before)
            starts[-1] -= np.uint64(after)
            return self._part(addresses, lengths, starts)
        return self._part(addresses, lengths, starts)

    def shifted(self, distance: int) -> Fragments:
        """Return the same fragments, each ``distance`` bytes further on."""
        # This runs once per layer, so it avoids the call of `_part`.
        part = _new(Fragments)
        part.addresses = self.addresses + np.uint64(distance % 2**64)  # may wrap around
        part.lengths = self.lengths
        part.starts = self.starts
        part.nbytes = self.nbytes
        part.owner = self.owner
        part.writable = self.writable
        part.device = self.device
        return part

    def selected(self, which: Ids | Bits) -> Fragments:
        """Return some of the fragments, by position or mask, as a new stream."""
        return self._part(self.addresses[which], self.lengths[which])

    def merged(self) -> Fragments:
        """Return the same stream, with adjacent fragments joined."""
        if self.addresses.size < 2:
            return self
        touches = self.addresses[1:] == self.addresses[:-1] + self.lengths[:-1]
        if not np.logical_or.reduce(touches):
            return self
        heads = np.concatenate(([True], ~touches)).nonzero()[0]
        return self._part(self.addresses[heads], np.add.reduceat(self.lengths, heads))

    def _part(
        self,
        addresses: Array,
        lengths: Array,
        starts: Array | None = None,
    ) -> Fragments:
        """Return other fragments of the same owner and device."""
        if starts is None:
            starts = np.zeros(lengths.size + 1, np.uint64)
            lengths.cumsum(out=starts[1:])
        part = _new(Fragments)
        part.addresses = addresses
        part.lengths = lengths
        part.starts = starts
        part.nbytes = starts.item(-1)
        part.owner = self.owner
        part.writable = self.writable
        part.device = self.device
        return part


def columns_of(count: int, length: int) -> tuple[Array, Array]:
    """Return the lengths and starts of fragments of one length, both read-only."""
    return _few_columns(count, length) if count <= _FEW else _columns(count, length)


def _columns(count: int, length: int) -> tuple[Array, Array]:
    lengths = np.empty(count, np.uint64)
    lengths.fill(length)
    starts = np.arange(0, count * length + 1, length, dtype=np.uint64)
    lengths.flags.writeable = starts.flags.writeable = False
    return lengths, starts


# Fragments up to this number share them: 1 MiB at most.
_FEW: Final = 1024
_few_columns: Final = lru_cache(64)(_columns)


def concatenated(parts: Sequence[Fragments]) -> Fragments:
    """Join lists into one stream; device and writability must be the same in all."""
    first = parts[0]
    return Fragments(
        np.concatenate([part.addresses for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        owner=[part.owner for part in parts],
        writable=first.writable,
        device=first.device,
    )


Payload = memoryview | Fragments
"""Bytes in memory: one C-contiguous byte view (format "B"), or many fragments."""


def view_of(address: int, nbytes: int, *, owner: object, writable: bool) -> memoryview:
    """Return a view of memory, which keeps ``owner`` alive."""
    return np.asarray(_Memory(address, nbytes, owner, writable)).data


class _Memory:
    """Memory at an address, for NumPy's ``__array_interface__``."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(
        self, address: int, nbytes: int, owner: object, writable: bool
    ) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (address, not writable),
            "shape": (nbytes,),
            "typestr": "|u1",
        }


def _check(addresses: Array, lengths: Array) -> None:
    if addresses.dtype != UINT64 or lengths.dtype != UINT64:
        raise UsageError("fragments: addresses and lengths must be uint64 arrays")
    if addresses.shape != lengths.shape or addresses.ndim != 1:
        raise UsageError(
            "fragments: addresses and lengths must be 1-D and of the same length"
        )
    if not np.logical_and.reduce(lengths):
        raise UsageError("fragments: a fragment has 0 bytes")
