"""Which block is in which slot of a tier, and which of them goes next.

Theory
------
A key names a block: the digest of its namespace (see :mod:`kvwire.store.namespace`) and
its hash. A slot is *free*, *taken* (somebody is filling it: it has no name yet), or
*named*. A slot that is taken, read or written back is *pinned*, as often as there are
users of it, and is not evicted meanwhile.

Named slots that nobody has pinned are in a list for each slot size, the one to go first
in front. A slot goes to the back when its last user lets go of it: using is touching.
What a call lets go of goes back in reverse order of its keys, which are those of a
chain from the head on. So of one chain the tail is evicted before the head, without
which it is worth nothing.

A size that has no slot left takes a slab of another size when the whole slab is older
than anything of its own. So a model that is no longer used makes room, and one that is
used does not lose a slab for a single block of another.

The list is an ``OrderedDict``, and every call goes over its keys within C: a ``map``
into a ``deque`` of length 0. Each is O(1) a block, whatever the tier holds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvwire.kv.blocks import Bits, Ids
from kvwire.store.tiers.slabs import Slabs, rounded

Key: TypeAlias = bytes
Keys: TypeAlias = npt.NDArray[np.object_]
Orders: TypeAlias = npt.NDArray[np.uint8]

NO_SLOT = -1
"""What :meth:`Index.find` says of a block that is not there."""


def as_keys(keys: Iterable[Key]) -> Keys:
    """Return the keys as an array, which takes any selection at once."""
    listed = list(keys)
    array = np.empty(len(listed), np.object_)
    array[:] = listed
    return array


def once(keys: Keys) -> Bits:
    """Tell which keys are not there before, among them."""
    listed = keys.tolist()
    places = dict(zip(reversed(listed), range(keys.size)[::-1], strict=True))
    first: npt.NDArray[np.bool_] = np.zeros(keys.size, np.bool_)
    first[list(places.values())] = True
    return first


class IndexedSlots(NamedTuple):
    """Lists blocks and the slots that they are in."""

    keys: Keys
    slots: Ids


class Index:
    """Finds the blocks of one tier. Pure, and not thread-safe.

    Args:
        slabs: The room.

    Attributes:
        evicted: Blocks forgotten to make room.
    """

    __slots__ = (
        "_clock",
        "_lists",
        "_newest",
        "_orders",
        "_pins",
        "_slots",
        "_used_at",
        "evicted",
        "slabs",
    )

    def __init__(self, slabs: Slabs) -> None:
        self.slabs: Slabs = slabs
        self.evicted: int = 0
        self._slots: dict[Key, int] = {}
        self._lists: dict[int, OrderedDict[Key, int]] = {}
        self._pins = np.zeros(slabs.slots, np.int32)
        self._orders = np.zeros(slabs.slots, np.uint8)
        self._used_at = np.zeros(slabs.slots, np.int64)
        self._newest = np.zeros(len(slabs), np.int64)
        self._clock = 0

    def __len__(self) -> int:
        """Return the number of blocks that have a name."""
        return len(self._slots)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of slots that there have been."""
        return tuple(self._lists)

    def named(self) -> IndexedSlots:
        """Return every block that has a name, and where it is."""
        slots = np.fromiter(self._slots.values(), np.int64, len(self._slots))
        return IndexedSlots(as_keys(self._slots), slots)

    def find(self, keys: Keys) -> Ids:
        """Return the slot of each block, or ``NO_SLOT``."""
        found = map(self._slots.get, keys.tolist(), repeat(NO_SLOT))
        return np.fromiter(found, np.int64, keys.size)

    def orders(self, slots: Ids) -> Orders:
        """Return the order of each image; see :mod:`kvwire.store.namespace`."""
        return self._orders[slots]

    def take(self, nbytes: int, count: int) -> Ids:
        """Take up to so many free slots for blocks of ``nbytes``; each is pinned."""
        slots = self.slabs.take(nbytes, count)
        self._pins[slots] = 1
        return slots

    def give_back(self, slots: Ids) -> None:
        """Free taken slots that are not going to be named."""
        self._pins[slots] = 0
        self.slabs.give(slots)

    def mark(self, slots: Ids, orders: Orders) -> None:
        """Say in which order the images in taken slots are."""
        self._orders[slots] = orders

    def name(self, keys: Keys, slots: Ids) -> None:
        """Say what taken slots hold. Whoever took them has them pinned still."""
        self._slots.update(zip(keys.tolist(), slots.tolist(), strict=True))

    def adopt(self, keys: Keys, slots: Ids, orders: Orders) -> None:
        """Name slots of one size that were taken before, those used last in front."""
        self._pins[slots] = 1
        self.mark(slots, orders)
        self.name(keys, slots)
        self.unpin(keys, slots)

    @property
    def pinned(self) -> int:
        """Return how many slots are pinned now."""
        return int(np.count_nonzero(self._pins))

    def pin(self, keys: Keys, slots: Ids) -> None:
        """Hold named slots; one that is there twice is held twice."""
        np.add.at(self._pins, slots, 1)
        # A pinned slot is in no list, so `victims` cannot choose it.
        for listed, which in self._lists_of(slots):
            _each(map(listed.pop, keys[which].tolist(), repeat(None)))

    def unpin(self, keys: Keys, slots: Ids) -> None:
        """Let go of named slots; they are now the ones used last, the head last."""
        assert self._pins[slots].all(), "somebody has let go twice"
        np.subtract.at(self._pins, slots, 1)
        left = self._pins[slots] == 0
        names, numbers = keys[left][::-1], slots[left][::-1]
        for listed, which in self._lists_of(numbers):
            pairs = zip(names[which].tolist(), numbers[which].tolist(), strict=True)
            listed.update(pairs)
        # The head of a chain is a moment younger than what follows it.
        self._clock += numbers.size
        self._used_at[numbers] = self._clock - np.arange(numbers.size)[::-1]
        self._newest[numbers // self.slabs.stride] = self._clock

    def touch(self, keys: Keys, slots: Ids) -> None:
        """Make named slots the last used; each is there once or more."""
        self.pin(keys, slots)
        self.unpin(keys, slots)

    def victims(self, nbytes: int, count: int) -> IndexedSlots:
        """Pin and return the blocks to go first to make room for ``nbytes``.

        Returns:
            Up to ``count`` of that size, or all of a slab of another size; none if
            everything is pinned.
        """
        own = self._lists.setdefault(rounded(nbytes), OrderedDict())
        slab = self._older_slab(rounded(nbytes), own)
        if slab is not None:
            size = self._lists[int(self.slabs.slot_bytes[slab])]
            numbers = np.fromiter(size.values(), np.int64, len(size))
            inside = numbers // self.slabs.stride == slab
            named = IndexedSlots(as_keys(size)[inside], numbers[inside])
            self.pin(*named)
            return named
        pairs = list(map(own.popitem, repeat(False, min(count, len(own)))))
        slots = np.fromiter((slot for _, slot in pairs), np.int64, len(pairs))
        self._pins[slots] = 1
        return IndexedSlots(as_keys(key for key, _ in pairs), slots)

    def forget(self, keys: Keys, slots: Ids) -> Bits:
        """Take the names of pinned blocks that nobody else has pinned.

        Returns:
            Those without a name now, which are still taken; the others were let go of.
        """
        # A second pin is a reader's: its slot keeps name and image until it lets go.
        alone: Bits = self._pins[slots] == 1
        _each(map(self._slots.pop, keys[alone].tolist()))
        self.unpin(keys[~alone], slots[~alone])
        return alone

    def drop(self, keys: Keys, slots: Ids) -> Bits:
        """Forget pinned blocks that nobody else has pinned; let go of the others.

        Returns:
            Which were forgotten; their slots are free.
        """
        alone = self.forget(keys, slots)
        self.give_back(slots[alone])
        return alone

    def evict(self, nbytes: int, count: int) -> IndexedSlots:
        """Forget the blocks that go first; their slots are free."""
        named = self.victims(nbytes, count)
        self.drop(*named)
        self.evicted += named.slots.size
        return named

    def _lists_of(
        self, slots: Ids
    ) -> Iterator[tuple[OrderedDict[Key, int], Bits | slice]]:
        """Return the lists of slots by size, and which belongs to each."""
        sizes = self.slabs.slot_bytes[slots // self.slabs.stride]
        several = bool(sizes.size and (sizes != sizes[0]).any())
        for size in set(sizes.tolist()) if several else sizes[:1].tolist():
            listed = self._lists.setdefault(size, OrderedDict())
            yield listed, sizes == size if several else slice(None)

    def _older_slab(self, slot: int, own: OrderedDict[Key, int]) -> int | None:
        """Return a slab of another size older than all of this one."""
        slabs = self.slabs
        others = np.flatnonzero((slabs.slot_bytes != slot) & (slabs.slot_bytes > 0))
        if not others.size or not slabs.capacity(slot):
            return None
        oldest = self._used_at[next(iter(own.values()))] if own else self._clock + 1
        older = others[self._newest[others] < oldest]
        for slab in older[np.argsort(self._newest[older])].tolist():
            # A slab changes its size as a whole: one pinned slot keeps all of it.
            begin = slab * slabs.stride
            if not self._pins[begin : begin + slabs.stride].any():
                return int(slab)
        return None


def _each(calls: Iterable[object]) -> None:
    """Make every call of a ``map``, without a bytecode for each."""
    deque(calls, maxlen=0)
