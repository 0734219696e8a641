"""Eviction order of blocks of one size: least recently used, or S3-FIFO.

Least recently used (``lru``): each use moves a block to the back of the queue. A single
scan over documents that are read only once evicts everything else.

S3-FIFO (``s3fifo``; Yang, Zhang, Qiu, Yue, Rashmi: *FIFO queues are all you need for
cache eviction*, SOSP 2023): a new block enters a small queue, a tenth of the tier. At
its front a block is evicted, unless it was used meanwhile; then it moves to the main
queue. There each use earns a block one more round, at most three. The names of blocks
evicted from the small queue are remembered for a while, and a block put again within
that time enters the main queue directly. So a scan displaces only a tenth of the tier.
A use is only counted, and never reorders a queue.

Both take O(1) per block on average, and calls loop over blocks within C; see
:mod:`kvwire_store.index`. Blocks of a chain enter tail first, and leave in that order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from kvwire.kv.blocks import Bits, Ids
from kvwire_store.keys import Key, Keys

# As in the paper: the small queue is a tenth, and uses beyond three do not count.
_SMALL_SHARE: Final = 10
_USES_MAX: Final = 3

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
        uses: The uses of each slot, as far as they count.
        names: The key of each slot's block, or of the last block that it had.
        queued_at: For ``lru``, the clock at the slot's last release; 0 if the slot is
            not in a queue.
        clock: Counts the releases of all queues.
    """

    __slots__ = ("clock", "names", "pins", "queued_at", "uses")

    def __init__(self, slots: int) -> None:
        self.pins: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.uses: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self.names: Keys = np.empty(slots, np.object_)
        self.queued_at: Ids = np.zeros(slots, np.int64)
        self.clock: int = 0


class EvictionQueue(ABC):
    """Orders the evictable blocks of one size."""

    __slots__ = ("state",)

    counts: ClassVar[bool] = False
    """Whether it needs a call for each use."""

    def __init__(self, state: SlotState) -> None:
        self.state: SlotState = state

    @abstractmethod
    def hold(self, keys: Keys, slots: Ids) -> None:
        """Mark blocks as in use, so that they are not evicted."""

    @abstractmethod
    def release(self, keys: Keys, slots: Ids) -> None:
        """Mark blocks as no longer in use, a chain's tail first."""

    def used(self, slots: Ids) -> None:  # noqa: B027 - not every kind counts
        """Count one use of some blocks."""

    @abstractmethod
    def pop(self, count: int) -> tuple[Keys, Ids]:
        """Remove and return up to ``count`` blocks to evict, in order."""

    @abstractmethod
    def remove(self, keys: Keys, slots: Ids) -> None:
        """Remove some blocks; blocks that are not in the queue are ignored."""

    @abstractmethod
    def oldest(self) -> int | None:
        """Return the slot in front; None if the queue is empty."""


class LruQueue(EvictionQueue):
    """Evicts the least recently used block first.

    The queue is a log of releases, each a slot and the clock. An entry counts if its
    clock is still its slot's ``queued_at``. So a call that takes slots out of the queue
    leaves the log as it is. A full log loses the entries that do not count, and gets
    room for as many as are left.
    """

    __slots__ = ("_begin", "_end", "_log")

    def __init__(self, state: SlotState) -> None:
        super().__init__(state)
        # Slots in the first row, clocks in the second one; in use from begin to end.
        self._log: Ids = np.empty((2, _LOG_MIN), np.int64)
        self._begin = 0
        self._end = 0

    def hold(self, keys: Keys, slots: Ids) -> None:
        """Take blocks out; a later release puts them at the back."""
        self.state.queued_at[slots] = 0

    def release(self, keys: Keys, slots: Ids) -> None:
        """Put blocks at the back, whether they are in the queue or not."""
        count = slots.size
        if self._end + count > self._log.shape[1]:
            self._make_room(count)
        state = self.state
        begin = self._end
        self._end += count
        if count == 1:
            state.clock += 1
            slot = slots.item(0)
            self._log[0, begin] = slot
            self._log[1, begin] = state.queued_at[slot] = state.clock
            return
        clocks = np.arange(state.clock + 1, state.clock + count + 1)
        state.clock += count
        self._log[0, begin : self._end] = slots
        self._log[1, begin : self._end] = clocks
        # Of a slot that is listed twice, the last clock stays.
        state.queued_at[slots] = clocks

    def pop(self, count: int) -> tuple[Keys, Ids]:
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

    def remove(self, keys: Keys, slots: Ids) -> None:
        self.state.queued_at[slots] = 0

    def oldest(self) -> int | None:
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


class S3FifoQueue(EvictionQueue):
    """Evicts first the blocks that were not reused soon after their put."""

    __slots__ = ("_ghosts", "_main", "_small")

    counts = True

    def __init__(self, state: SlotState) -> None:
        super().__init__(state)
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghosts: OrderedDict[Key, None] = OrderedDict()

    def hold(self, keys: Keys, slots: Ids) -> None:
        """Do nothing: a block in use keeps its place, but eviction skips it."""

    def release(self, keys: Keys, slots: Ids) -> None:
        """Add new blocks; a block in a queue keeps its place."""
        names = keys.tolist()
        new = ~(_among(names, self._small) | _among(names, self._main))
        if not new.any():
            return
        keys = keys[new]
        slots = slots[new]
        names = keys.tolist()
        hot = _among(names, self._ghosts) | (self.state.uses[slots] > 1)
        each(map(self._ghosts.pop, names, repeat(None)))
        _append(self._main, keys, slots, hot)
        _append(self._small, keys, slots, ~hot)

    def used(self, slots: Ids) -> None:
        uses = self.state.uses
        uses[slots] = np.minimum(uses[slots] + 1, _USES_MAX)

    def pop(self, count: int) -> tuple[Keys, Ids]:
        """Remove and return the next blocks; visits each at most four times."""
        found: list[tuple[Keys, Ids]] = []
        uses = self.state.uses
        pins = self.state.pins
        while count and (self._small or self._main):
            total = len(self._small) + len(self._main)
            excess = len(self._small) - total // _SMALL_SHARE
            if excess > 0 or not self._main:
                keys, slots = _popped(self._small, min(count, max(1, excess)))
                free = pins[slots] == 0
                stays = free & (uses[slots] > 1)
                uses[slots[stays]] = 0
                ghosts = keys[free & ~stays].tolist()
                self._ghosts.update(zip(ghosts, repeat(None)))
            else:
                keys, slots = _popped(self._main, count)
                free = pins[slots] == 0
                stays = free & (uses[slots] > 0)
                uses[slots[stays]] -= 1
            # Blocks in use leave the queues now, and return when they are released.
            _append(self._main, keys, slots, stays)
            gone = free & ~stays
            found.append((keys[gone], slots[gone]))
            count -= int(gone.sum())
        most = len(self._small) + len(self._main)
        while len(self._ghosts) > most:
            self._ghosts.popitem(last=False)
        if not found:
            return np.empty(0, np.object_), np.empty(0, np.int64)
        return (
            np.concatenate([keys for keys, _ in found]),
            np.concatenate([slots for _, slots in found]),
        )

    def remove(self, keys: Keys, slots: Ids) -> None:
        names = keys.tolist()
        each(map(self._small.pop, names, repeat(None)))
        each(map(self._main.pop, names, repeat(None)))

    def oldest(self) -> int | None:
        """Return the slot in front, skipping blocks in use as ``pop`` does."""
        for queue in (self._small, self._main):
            while queue:
                key, slot = next(iter(queue.items()))
                if not self.state.pins[slot]:
                    return slot
                del queue[key]
        return None


EVICTIONS: Final[dict[str, type[EvictionQueue]]] = {
    "lru": LruQueue,
    "s3fifo": S3FifoQueue,
}
"""By the name that a tier's ``?evict=`` has."""


def _popped(listed: OrderedDict[Key, int], count: int) -> tuple[Keys, Ids]:
    pairs = dict(map(listed.popitem, repeat(False, min(count, len(listed)))))
    keys = np.empty(len(pairs), np.object_)
    keys[:] = list(pairs)
    return keys, np.fromiter(pairs.values(), np.int64, len(pairs))


def _among(
    names: list[Key], known: OrderedDict[Key, int] | OrderedDict[Key, None]
) -> Bits:
    return np.fromiter(map(known.__contains__, names), np.bool_, len(names))


def _append(listed: OrderedDict[Key, int], keys: Keys, slots: Ids, which: Bits) -> None:
    listed.update(zip(keys[which].tolist(), slots[which].tolist(), strict=True))
