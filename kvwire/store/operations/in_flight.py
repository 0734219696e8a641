"""Which blocks are just being brought into a tier, so that nobody brings them twice."""

from __future__ import annotations

import asyncio
from itertools import repeat

import numpy as np

from kvwire.kv.blocks import Bits
from kvwire.store.index import Key, Keys, as_keys


class InFlightFills:
    """Tracks the keys whose slots are being filled, on one event loop.

    Who fills waits for nothing but a copy or a disk, never for room or for another
    fill. So whoever waits for a fill, holding pins or not, waits for something that
    ends.
    """

    def __init__(self) -> None:
        self._ends: dict[Key, asyncio.Event] = {}

    def __len__(self) -> int:
        """Return how many blocks are being filled."""
        return len(self._ends)

    def busy(self, keys: Keys) -> Bits:
        """Return which of these somebody is filling."""
        found = map(self._ends.__contains__, keys.tolist())
        return np.fromiter(found, np.bool_, keys.size)

    def of_namespace(self, digest: bytes) -> Keys:
        """Return which blocks of a namespace somebody is filling."""
        return as_keys(key for key in self._ends if key.startswith(digest))

    def begin(self, keys: Keys) -> None:
        """Note that the caller fills these, which nobody does yet."""
        self._ends.update(zip(keys.tolist(), repeat(asyncio.Event())))

    def end(self, keys: Keys) -> None:
        """End the fills of one :meth:`begin`, filled or not."""
        if keys.size:
            ends = list(map(self._ends.pop, keys.tolist()))
            ends[0].set()

    async def ended(self, key: Key) -> None:
        """Wait until nobody fills this block any more.

        Cancel safety: safe, it only watches.
        """
        if key in self._ends:
            await self._ends[key].wait()
