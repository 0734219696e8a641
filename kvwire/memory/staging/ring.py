"""Which slots of a staging ring are in use, and for what.

::

             take()            filled()           emptied()
    FREE ------------> FILLING ----------> FULL ------------> FREE
      ^                   |
      +-------------------+ dropped()

On the way out the device fills a slot and the transport empties it; on the way in the
transport fills it and the device empties it. Slots are taken in turn, so that the one
used longest ago is next; they come back in any order. When none is free, whoever would
take one waits: that is all there is of back-pressure, and it needs no number from a
peer.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final


class SlotState(enum.Enum):
    """Names what a slot is in use for."""

    FREE = "free"
    FILLING = "filling"
    FULL = "full"


class Ring:
    """Tracks the slots of one connection in one direction, by number."""

    __slots__ = ("_free", "_uses")

    def __init__(self, slots: int) -> None:
        self._uses: Final = [SlotState.FREE] * slots
        self._free = deque(range(slots), maxlen=slots)

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._uses)

    @property
    def free(self) -> int:
        """Return how many can be taken."""
        return len(self._free)

    def use(self, slot: int) -> SlotState:
        """Return what a slot is in use for."""
        return self._uses[slot]

    def take(self) -> int:
        """Take a free slot to fill; there must be one."""
        slot = self._free.popleft()
        self._uses[slot] = SlotState.FILLING
        return slot

    def filled(self, slot: int) -> None:
        """Note that a slot holds its bytes, which may be read from now on."""
        self._leave(slot, SlotState.FILLING)
        self._uses[slot] = SlotState.FULL

    def emptied(self, slot: int) -> None:
        """Free a slot that nobody reads any more."""
        self._leave(slot, SlotState.FULL)
        self._free.append(slot)

    def dropped(self, slot: int) -> None:
        """Free a slot that nobody will fill."""
        self._leave(slot, SlotState.FILLING)
        self._free.append(slot)

    def _leave(self, slot: int, use: SlotState) -> None:
        assert self._uses[slot] is use, f"slot {slot} is {self._uses[slot].value}"
        self._uses[slot] = SlotState.FREE
