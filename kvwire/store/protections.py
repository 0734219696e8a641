"""The end times of a tier's pins and retentions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat
from typing import Final

import numpy as np

from kvwire.kv.blocks import Bits, Ids
from kvwire.store.eviction import each
from kvwire.store.keys import Key, Keys

KEPT: Final = 0
RETAINED: Final = 1
"""The two kinds of protection: pins prevent eviction, and retentions delay it."""


class Protections:
    """The protected slots of each kind, with their end times.

    Attributes:
        on: For each kind and slot, whether it is protected.
        until: When that ends, in seconds since 1970; infinity for never.
        next: No protection ends before this time; infinity if none ends.
    """

    __slots__ = ("_keys", "next", "on", "until")

    def __init__(self, slots: int) -> None:
        self.on = np.zeros((2, slots), np.bool_)
        self.until = np.zeros((2, slots), np.float64)
        self.next: float = math.inf
        # The slots that are protected in any way. bounded: by the slots
        self._keys: dict[int, Key] = {}

    def __len__(self) -> int:
        """Return the number of protected slots."""
        return len(self._keys)

    def begin(self, kind: int, keys: Keys, slots: Ids, until: float) -> None:
        """Protect named slots until a time; the latest of several ends counts."""
        if slots.size:
            before = np.where(self.on[kind, slots], self.until[kind, slots], 0.0)
            self.until[kind, slots] = np.maximum(before, until)
            self.on[kind, slots] = True
            self.next = min(self.next, until)
            self._keys.update(zip(slots.tolist(), keys.tolist(), strict=True))

    def end(self, kind: int, slots: Ids) -> None:
        """End the protection of slots."""
        self.on[kind, slots] = False
        over = slots[~self.on[:, slots].any(axis=0)]
        each(map(self._keys.pop, over.tolist(), repeat(None)))

    def late(self, now: float) -> Iterator[tuple[int, Keys, Ids]]:
        """Yield each kind with its expired slots; the caller ends them."""
        self.next = math.inf
        for kind in (KEPT, RETAINED):
            slots = self.on[kind].nonzero()[0]
            over: Bits = self.until[kind, slots] <= now
            left = self.until[kind, slots[~over]]
            self.next = min(self.next, float(left.min(initial=math.inf)))
            slots = slots[over]
            if slots.size:
                keys = np.empty(slots.size, np.object_)
                keys[:] = list(map(self._keys.__getitem__, slots.tolist()))
                yield kind, keys, slots
