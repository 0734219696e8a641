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

Both take O(1) per block, and calls loop over blocks within C; see
:mod:`kvwire.store.index`. Blocks of a chain enter tail first, and leave in that order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from typing import ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire.kv.blocks import Bits, Ids

Key: TypeAlias = bytes
Keys: TypeAlias = npt.NDArray[np.object_]

# As in the paper: the small queue is a tenth, and uses beyond three do not count.
_SMALL_SHARE: Final = 10
_USES_MAX: Final = 3


each: Final[Callable[[Iterable[object]], object]] = partial(deque, maxlen=0)
"""Makes every call of a ``map``, without a bytecode for each."""


class SlotState:
    """The part of a slot's state that eviction needs."""

    __slots__ = ("pins", "uses")

    def __init__(self, slots: int) -> None:
        self.pins: npt.NDArray[np.int32] = np.zeros(slots, np.int32)
        self.uses: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)


class EvictionQueue(ABC):
    """Order the evictable blocks of one size."""

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
    """Evict the least recently used block first."""

    __slots__ = ("_list",)

    def __init__(self, state: SlotState) -> None:
        super().__init__(state)
        self._list: OrderedDict[Key, int] = OrderedDict()

    def hold(self, keys: Keys, slots: Ids) -> None:
        """Take blocks out; a later release puts them at the back."""
        each(map(self._list.pop, keys.tolist(), repeat(None)))

    def release(self, keys: Keys, slots: Ids) -> None:
        """Put blocks at the back, whether they are in the queue or not."""
        names = keys.tolist()
        if names and names[0] in self._list:
            # Usually all of them are in the queue and were touched; this case takes
            # half as long.
            try:
                each(map(self._list.move_to_end, names))
            except KeyError:
                pass  # some are not in the queue
            else:
                return
        each(map(self._list.pop, names, repeat(None)))
        self._list.update(zip(names, slots.tolist(), strict=True))

    def pop(self, count: int) -> tuple[Keys, Ids]:
        if count == 1 and self._list:
            key, slot = self._list.popitem(last=False)
            return np.array((key,), np.object_), np.array((slot,), np.int64)
        return _popped(self._list, count)

    def remove(self, keys: Keys, slots: Ids) -> None:
        each(map(self._list.pop, keys.tolist(), repeat(None)))

    def oldest(self) -> int | None:
        return next(iter(self._list.values()), None)


class S3FifoQueue(EvictionQueue):
    """Evict first the blocks that were not reused soon after their put."""

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
