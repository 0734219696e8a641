"""Eviction order of blocks of one size: the least recently used block goes first.

Each use moves a block to the back of the queue. Every call takes O(1) per block on
average, and loops over blocks within C; see :mod:`kvwire_store.index`. Blocks of a
chain enter tail first, and leave in that order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.kv.blocks import Ids
from kvwire_store.keys import Keys

# The entries of an empty log, and those that are looked at together to find the first
# one that counts: twice as many each time, up to a most.
_LOG_MIN: Final = 256
_WINDOW: Final = 16
_WINDOW_MAX: Final = 1 << 16
_NO_SLOTS: Final = np.empty(0, np.int64)

each: Final[Callable[[Iterable[object]], object]] = partial(deque, maxlen=0)
"""Makes every call of a ``map``, without a bytecode for each."""


class SlotState:
    """The part of a slot's state that eviction needs.

    Attributes:
        pins: The number of users of each slot.
        names: The key of each slot's block, or of the last block that it had.
        queued_at: The clock at the slot's last release; 0 if the slot is not in a
            queue.
        clock: Counts the releases of all queues.
    """

    __slots__ = ("clock", "names", "pins", "queued_at")

    def __init__(self, slots: int) -> None:
        self.pins: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.names: Keys = np.empty(slots, np.object_)
        self.queued_at: Ids = np.zeros(slots, np.int64)
        self.clock: int = 0


class EvictionQueue:
    """Orders the evictable blocks of one size.

    The queue is a log of releases, each a slot and the clock. An entry counts if its
    clock is still its slot's ``queued_at``. So a call that takes slots out of the queue
    leaves the log as it is. A full log loses the entries that do not count, and gets
    room for as many as are left.
    """

    __slots__ = ("_begin", "_end", "_log", "state")

    def __init__(self, state: SlotState) -> None:
        self.state: SlotState = state
        # Slots in the first row, clocks in the second one; in use from begin to end.
        self._log: Ids = np.empty((2, _LOG_MIN), np.int64)
        self._begin = 0
        self._end = 0

    def take_out(self, slots: Ids) -> None:
        """Take out the blocks that are in the queue."""
        self.state.queued_at[slots] = 0

    def release(self, slots: Ids) -> None:
        """Put blocks at the back, whether they are in the queue or not."""
        count = slots.size
        if count == 1:
            self.release_one(slots.item(0))
            return
        if self._end + count > self._log.shape[1]:
            self._make_room(count)
        state = self.state
        begin = self._end
        self._end += count
        clocks = np.arange(state.clock + 1, state.clock + count + 1)
        state.clock += count
        self._log[0, begin : self._end] = slots
        self._log[1, begin : self._end] = clocks
        # Of a slot that is listed twice, the last clock stays.
        state.queued_at[slots] = clocks

    def release_one(self, slot: int) -> None:
        """Put a block at the back, whether it is in the queue or not."""
        if self._end == self._log.shape[1]:
            self._make_room(1)
        state = self.state
        begin = self._end
        self._end = begin + 1
        state.clock += 1
        self._log[0, begin] = slot
        self._log[1, begin] = state.queued_at[slot] = state.clock

    def pop(self, count: int) -> tuple[Keys, Ids]:
        """Remove and return up to ``count`` blocks to evict, in order."""
        if count == 1 and self._begin < self._end:
            slot, clock = self._log[:, self._begin].tolist()
            state = self.state
            if state.queued_at.item(slot) == clock:  # mostly
                self._begin += 1
                state.queued_at[slot] = 0
                one = np.array((slot,), np.int64)
                return np.array((state.names.item(slot),), np.object_), one
        found: list[Ids] = []
        while count and self._skip():
            slots, here = self._window(max(count, _WINDOW))
            here = here[:count]
            found.append(slots[here])
            self._begin += here.item(here.size - 1) + 1
            count -= here.size
        slots = found[0] if len(found) == 1 else np.concatenate((_NO_SLOTS, *found))
        self.state.queued_at[slots] = 0
        return self.state.names[slots], slots

    def oldest(self) -> int | None:
        """Return the slot in front; None if the queue is empty."""
        return self._log.item(0, self._begin) if self._skip() else None

    def _skip(self) -> bool:
        """Skip entries in front that do not count; return whether any is left."""
        window = _WINDOW
        while self._begin < self._end:
            slots, here = self._window(window)
            if here.size:
                self._begin += here.item(0)
                return True
            self._begin += slots.size
            window = min(2 * window, _WINDOW_MAX)
        return False

    def _window(self, count: int) -> tuple[Ids, Ids]:
        """Return the slots of the first entries, and the places of valid ones."""
        slots, clocks = self._log[:, self._begin : min(self._begin + count, self._end)]
        return slots, (self.state.queued_at[slots] == clocks).nonzero()[0]

    def _make_room(self, count: int) -> None:
        """Drop the entries that do not count, and make room for ``count`` more."""
        _, here = self._window(self._end - self._begin)
        left = self._log[:, self._begin + here]
        self._log = np.empty((2, max(_LOG_MIN, 2 * (here.size + count))), np.int64)
        self._log[:, : here.size] = left
        self._begin = 0
        self._end = here.size
