"""The pinned slots of a tier, and when each pin ends."""

from __future__ import annotations

import math

import numpy as np

from kvwire.kv.blocks import Bits, Ids
from kvwire_store.keys import Times


class Pins:
    """The slots that are pinned for a time or for ever.

    Attributes:
        on: For each slot, whether it is pinned.
        until: When that ends, in seconds since 1970; infinity for never.
        next: No pin ends before this time; infinity if none ends.
    """

    __slots__ = ("next", "on", "until")

    def __init__(self, slots: int) -> None:
        self.on: Bits = np.zeros(slots, np.bool_)
        self.until: Times = np.zeros(slots, np.float64)
        self.next: float = math.inf

    def begin(self, slots: Ids, until: float) -> None:
        """Pin named slots until a time; the latest of several ends counts."""
        if slots.size:
            before = np.where(self.on[slots], self.until[slots], 0.0)
            self.until[slots] = np.maximum(before, until)
            self.on[slots] = True
            self.next = min(self.next, until)

    def end(self, slots: Ids) -> None:
        """Unpin slots."""
        self.on[slots] = False

    def late(self, now: float) -> Ids:
        """Return the slots whose pins have expired; the caller ends them."""
        slots = self.on.nonzero()[0]
        over: Bits = self.until[slots] <= now
        self.next = float(self.until[slots[~over]].min(initial=math.inf))
        return slots[over]
