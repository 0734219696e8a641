"""A tier's space: slabs of equal length, each divided into slots of one size.

Blocks of different models, shards and cache groups differ in size, and one store may
hold all of them. A slab has no slot size until it is needed, and keeps one size until
it is empty again: nothing is ever moved, and the waste is less than a slot per slab,
plus the rounding to whole pages.

A slot's number is ``slab * stride + place``, where the stride is the largest number of
slots in a slab. So tables by slot number stay short, however small some slots are.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvwire.kv.blocks import Ids
from kvwire.limits import KIB
from kvwire.types import in_bytes
from kvwire_store.limits import STORE_SLOTS_MAX

# A multiple of disk sectors and of memory pages.
GRAIN_BYTES: Final = 4 * KIB


_Bytes = TypeVar("_Bytes", int, Ids)


def rounded(nbytes: _Bytes) -> _Bytes:
    """Round bytes up to whole grains."""
    return -(-nbytes // GRAIN_BYTES) * GRAIN_BYTES


def stride_of(slab_bytes: int) -> int:
    """Return the slot numbers per slab; files of disk tiers depend on the result."""
    return min(slab_bytes // GRAIN_BYTES, STORE_SLOTS_MAX)


class Slabs:
    """Tracks which slots are free.

    Args:
        slabs: The number of slabs.
        slab_bytes: Bytes of each, in whole grains.

    Attributes:
        begins: Shape (slots,): the offset of each slot in the tier, in bytes.
        stride: Slot numbers per slab.
        slot_bytes: Shape (slabs,): bytes of its slots; 0 while it has no slot size.
        used: Shape (slabs,): the number of its slots that are taken.
    """

    __slots__ = (
        "_blank",
        "_free",
        "_open",
        "_seen",
        "begins",
        "slab_bytes",
        "slot_bytes",
        "stride",
        "used",
    )

    def __init__(self, slabs: int, slab_bytes: int) -> None:
        assert slabs >= 1
        assert slab_bytes % GRAIN_BYTES == 0
        self.slab_bytes: int = slab_bytes
        self.stride: int = stride_of(slab_bytes)
        self.slot_bytes: npt.NDArray[np.int64] = np.zeros(slabs, np.int64)
        self.used: npt.NDArray[np.int64] = np.zeros(slabs, np.int64)
        self.begins: Ids = np.zeros(slabs * self.stride, np.int64)
        self._free: list[list[int]] = [[] for _ in range(slabs)]
        self._seen: set[int] = set()
        # For each size, the slabs with a free slot; the next one to fill is first.
        self._open: dict[int, dict[int, None]] = {}
        # The slabs without a size; the next one to take is last.
        self._blank = dict.fromkeys(range(slabs - 1, -1, -1))

    def __len__(self) -> int:
        """Return the number of slabs."""
        return self.slot_bytes.size

    @property
    def slots(self) -> int:
        """The number of slot numbers, some of which are unused."""
        return len(self) * self.stride

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the taken slots."""
        return int((self.used * self.slot_bytes).sum())

    def capacity(self, slot_bytes: int) -> int:
        """Return the number of slots of a size that fit a slab."""
        return min(self.stride, self.slab_bytes // slot_bytes)

    def news_of(self, nbytes: int) -> str:
        """Return how little of a slab blocks of a size can use, once for each size.

        Empty if it is more than half.
        """
        if nbytes in self._seen:
            return ""
        self._seen.add(nbytes)  # bounded: by the namespaces
        size = rounded(nbytes)
        count = self.capacity(size)
        used = count * nbytes
        if not used or 2 * used > self.slab_bytes:
            return ""
        share = f"blocks of {nbytes} bytes can use {used / self.slab_bytes:.1%} of it"
        reasons = []
        if size >= 2 * nbytes or count < self.stride:
            reasons.append(f"each takes {size} bytes")
        if 2 * count * size <= self.slab_bytes or not reasons:
            reasons.append(
                f"a slab of {in_bytes(self.slab_bytes)} has at most {self.stride} "
                f"blocks; open it with ?slab={count * size // KIB}KiB"
            )
        return f"{share}, since {', and '.join(reasons)}"

    def free(self, slot_bytes: int) -> int:
        """Return the number of slots of a size that :meth:`take` could return."""
        slabs = self._open.get(slot_bytes, ())
        ready = sum(map(len, map(self._free.__getitem__, slabs)))
        return ready + len(self._blank) * self.capacity(slot_bytes)

    def take(self, slot_bytes: int, count: int) -> Ids:
        """Take free slots of a size, which is in whole grains.

        Returns:
            Up to ``count`` slot numbers, ascending.
        """
        slabs = self._open.setdefault(slot_bytes, {})
        taken: list[int] = []
        while len(taken) < count:
            slab = next(iter(slabs), None)
            if slab is None:
                if not self._blank or slot_bytes > self.slab_bytes:
                    break
                slab, _ = self._blank.popitem()
                self.assign(slab, slot_bytes)
            free = self._free[slab]
            more = free[len(taken) - count :]
            del free[-len(more) :]
            taken += more
            self.used[slab] += len(more)
            if not free:
                del slabs[slab]
        return np.array(sorted(taken), np.int64)

    def give(self, slots: Ids) -> None:
        """Give slots back; a slab without taken slots loses its size."""
        if slots.size == 1:
            self._give(slots.item(0) // self.stride, slots.tolist())
            return
        slabs = slots // self.stride
        order = slabs.argsort(kind="stable")
        slots = slots[order]
        slabs = slabs[order]
        borders = (slabs[1:] != slabs[:-1]).nonzero()[0] + 1
        for begin, end in pairwise((0, *borders.tolist(), slots.size)):
            if end > begin:
                self._give(slabs.item(begin), slots[begin:end].tolist())

    def _give(self, slab: int, back: list[int]) -> None:
        """Give slots of one slab back."""
        self.used[slab] -= len(back)
        size = self._open[self.slot_bytes.item(slab)]
        if self.used.item(slab):
            self._free[slab] += back
            size[slab] = None
        else:
            self._free[slab].clear()
            size.pop(slab, None)
            self.slot_bytes[slab] = 0
            self._blank[slab] = None

    def assign(self, slab: int, slot_bytes: int) -> None:
        """Cut a slab into free slots of a size."""
        count = self.capacity(slot_bytes)
        self.slot_bytes[slab] = slot_bytes
        begin = slab * self.stride
        first = slab * self.slab_bytes
        self.begins[begin : begin + count] = np.arange(
            first, first + count * slot_bytes, slot_bytes
        )
        # Taken from the end. So the first slots are taken first, and are adjacent.
        self._free[slab] = list(range(begin + count - 1, begin - 1, -1))
        self._open.setdefault(slot_bytes, {})[slab] = None

    def restore(self, slab: int, slot_bytes: int, taken: Ids) -> None:
        """Give a slab the slot size it had before a restart, with some slots taken."""
        del self._blank[slab]
        self.assign(slab, slot_bytes)
        gone = set(taken.tolist())
        self._free[slab] = [slot for slot in self._free[slab] if slot not in gone]
        self.used[slab] = taken.size
        if not self._free[slab]:
            del self._open[slot_bytes][slab]
