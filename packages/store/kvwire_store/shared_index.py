"""An index in shared memory: the block in each slot of a store's memory.

Only the store's own process writes the index. Other processes on this host map it
together with the store's memory, and look up and read blocks without a request.

Theory
------
A block's *name* is the 128-bit xxh3 of its key. An *entry* has three words of 64 bits:

    tag    the first half of the name; 0 means that there is no entry
    place  the slot, and in the highest byte the order of the image
    seal   the slot's generation, masked with the second half of the name and the place

The name determines two buckets of eight entries, and the entry is in one of them. The
table has twice as many entries as there are slots, so both buckets are almost never
full. A block without an entry is *unlisted*: readers ask the server for it, and the
table contains the number of such blocks.

**Trust.** A reader trusts nothing in the table, because it may be read during a write,
and its writer may be malicious. A reader computes a slot and a generation from an entry
and *from the name that it looks for*, and then checks whether the slot has that
generation (:mod:`kvwire.memory.generations`). A generation is 64 random bits, and is
drawn anew as soon as the slot loses its block. So, except with a probability of 2**-64,
the two are equal only if

* all three words were written together, for this name and order, and
* the slot has held that block ever since.

An entry that is torn, overwritten, out of date or for another name is a miss. This
needs neither a lock nor a counter, whatever the order in which the words become
visible. As for any window, the generation is checked again after the image was copied,
which proves that every byte belongs to the block.

**Order.** The writer stores the image, then issues a fence, then stores the entry,
whose seal is the first use of this generation. A reader loads the entry before the
image, since the image's address depends on it; processors preserve this order. The
writer draws new generations, followed by a full fence, before the slot may be
overwritten.
"""

from __future__ import annotations

import threading
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest, xxh3_128_intdigest

from kvwire.errors import BackendUnavailable
from kvwire.kv.blocks import Bits, Ids
from kvwire.kv.fragments import Array
from kvwire.memory.generations import Generations, require_order, same_compiled
from kvwire_store.keys import NO_SLOT, Keys, Orders
from kvwire_store.namespace import ORDERS

WAYS: Final = 8
"""Entries per bucket: a bucket's tags fill one cache line."""
HEAD_WORDS: Final = 8
"""Words before the buckets; the first one is the number of unlisted blocks."""
_WORDS: Final = 3
_TAG: Final = 0
_PLACE: Final = 1
_SEAL: Final = 2
_ORDER_BIT: Final = 56
_ORDER_SHIFT: Final = np.uint64(_ORDER_BIT)
_SLOT_MASK: Final = (1 << _ORDER_BIT) - 1
_ORDERS: Final = np.uint64(len(ORDERS))
_ALL_BITS: Final = (1 << 64) - 1
# An odd number with evenly spread bits, so that different places have different masks.
_MIX: Final = 0x9E3779B97F4A7C15
_FOLD: Final = 32
# A slot without a block, or whose block has no entry.
_EMPTY: Final = -1
_UNLISTED: Final = -2


def words_for(slots: int) -> int:
    """Return the number of words of a table for this number of slots."""
    buckets = 1 << max(0, (2 * slots - 1) // WAYS).bit_length()
    return HEAD_WORDS + buckets * _WORDS * WAYS


class FoundSlots(NamedTuple):
    """The result of a lookup, for each block.

    Attributes:
        slots: The block's slot, or ``NO_SLOT``.
        generations: The generation that the slot had.
        orders: The order of the block's image.
    """

    slots: Ids
    generations: Array
    orders: Orders

    def selected(self, which: Bits) -> FoundSlots:
        """Return the result for some of the blocks."""
        return FoundSlots(
            self.slots[which], self.generations[which], self.orders[which]
        )


class SharedIndex:
    """Writes the table.

    Args:
        words: The table's memory: ``words_for(slots)`` zeros.
        generations: The generation of each slot.
    """

    def __init__(self, words: Array, generations: Generations) -> None:
        self._head = words[:HEAD_WORDS]
        self._entries = words[HEAD_WORDS:].reshape(-1, _WORDS, WAYS)
        self._tags = self._entries[:, _TAG]
        self._generations = generations
        # The position of each slot's entry: the bucket times WAYS, plus the place in
        # it.
        self._listed: Ids = np.full(generations.values.size, _EMPTY, np.int64)

    def add(self, keys: Keys, slots: Ids, orders: Orders) -> None:
        """Add blocks; their slots have no entry, and their images are complete."""
        if _KEEPS_ORDER:
            with _FENCE:  # a locked instruction, also for stores past the caches
                pass
        else:
            self._generations.renew(_NO_SLOTS)  # ends with a full fence
        if keys.size == 1:
            self._add_one(keys[0], slots.item(0), orders.item(0))
            return
        names = _names(keys)
        places = slots.view(np.uint64) | orders.astype(np.uint64) << _ORDER_SHIFT
        seals = self._generations.current(slots) ^ _masks(names[:, 1], places)
        entries = np.stack((names[:, 0], places, seals), axis=1)
        buckets = names & np.uint64(len(self._tags) - 1)
        left = np.arange(keys.size)
        while left.size:
            free = self._tags[buckets[left]] == 0
            rooms = np.add.reduce(free, axis=2)
            choice = (rooms[:, 1] > rooms[:, 0]).view(np.int8)
            row = np.arange(left.size)
            bucket = buckets[left, choice]
            # One block per bucket at a time.
            row = np.unique(bucket, return_index=True)[1]
            row = row[rooms[row, choice[row]] > 0]
            if not row.size:
                break
            way = free[row, choice[row]].argmax(axis=1)
            at = bucket[row]
            which = left[row]
            # The tag is last, since entries without a tag are ignored. The order of the
            # other words does not matter.
            for word in (_SEAL, _PLACE, _TAG):
                self._entries[at, word, way] = entries[which, word]
            self._listed[slots[which]] = at.view(np.int64) * WAYS + way
            left = np.delete(left, row)
        self._listed[slots[left]] = _UNLISTED
        self._head[0] += np.uint64(left.size)

    def remove(self, slots: Ids) -> None:
        """Withdraw the blocks of some slots; then the slots may be overwritten."""
        self._generations.renew(slots)
        if slots.size == 1:
            at = self._listed.item(slots.item(0))
            if at >= 0:
                self._tags[divmod(at, WAYS)] = 0
            elif at == _UNLISTED:
                self._head[0] -= 1
        else:
            listed = self._listed[slots]
            self._head[0] -= np.uint64(np.count_nonzero(listed == _UNLISTED))
            self._tags[np.divmod(listed[listed >= 0], WAYS)] = 0
        self._listed[slots] = _EMPTY

    def _add_one(self, key: bytes, slot: int, order: int) -> None:
        """Add one block without arrays, which is several times faster."""
        first, second = divmod(xxh3_128_intdigest(key), 1 << 64)
        tag = first or 1
        place = slot | order << _ORDER_BIT
        mask = len(self._tags) - 1
        buckets = tag & mask, second & mask
        tags = [self._tags[bucket].tolist() for bucket in buckets]
        choice = int(tags[1].count(0) > tags[0].count(0))
        if 0 not in tags[choice]:
            self._listed[slot] = _UNLISTED
            self._head[0] += 1
            return
        entry = self._entries[buckets[choice]]
        way = tags[choice].index(0)
        seal = self._generations.values.item(slot) ^ _mask(second, place)
        for word, value in ((_SEAL, seal), (_PLACE, place), (_TAG, tag)):
            entry[word, way] = value
        self._listed[slot] = buckets[choice] * WAYS + way


class IndexReader:
    """Looks blocks up in a table that another process writes.

    Args:
        words: The table. Only its size is trusted.
        generations: The generation of each slot.
    """

    def __init__(self, words: Array, generations: Array) -> None:
        self._head = words[:HEAD_WORDS]
        self._entries = words[HEAD_WORDS:].reshape(-1, _WORDS, WAYS)
        self._tags = self._entries[:, _TAG]
        self._generations = generations
        self._mask = len(self._tags) - 1

    @property
    def complete(self) -> bool:
        """Return whether every block of the memory has an entry."""
        return not self._head.item(0)

    def find(self, keys: Keys) -> FoundSlots:
        """Look up blocks."""
        if keys.size == 1:
            return self._find_one(keys[0])
        names = _names(keys)
        found = FoundSlots(
            np.full(keys.size, NO_SLOT, np.int64),
            np.zeros(keys.size, np.uint64),
            np.zeros(keys.size, np.uint8),
        )
        buckets = names & np.uint64(self._mask)
        left = np.arange(keys.size)
        for choice in range(2):
            bucket = buckets[left, choice]
            alike = self._tags[bucket] == names[left, _TAG, None]
            row, way = alike.nonzero()
            left = left[self._take(found, names, left[row], bucket[row], way, left)]
            if not left.size:
                break
        return found

    def same(self, found: FoundSlots) -> Bits:
        """Return which blocks are unchanged; call it after reading their images."""
        table = self._generations
        with _FENCE:  # a locked instruction: all loads before it are over
            pass
        if found.slots.size == 1 and _KEEPS_ORDER:
            there = table.item(found.slots.item(0)) == found.generations.item(0)
            return _YES if there else _NO
        if same_compiled is None:
            here: Bits = table[found.slots] == found.generations
            return here
        here = np.empty(found.slots.size, np.bool_)
        columns = (table, found.slots, found.generations, here)
        first, slots, generations, result = map(_address, columns)
        same_compiled.held(first, table.size, slots, generations, here.size, result)
        return here

    # --- inside -----------------------------------------------------------------------

    def _take(
        self,
        found: FoundSlots,
        names: Array,
        which: Ids,
        bucket: Array,
        way: Ids,
        left: Ids,
    ) -> Bits:
        """Check entries with matching tags; return the blocks not found yet."""
        places = self._entries[bucket, _PLACE, way]
        seals = self._entries[bucket, _SEAL, way]
        slots = (places & np.uint64(_SLOT_MASK)).view(np.int64)
        inside = slots < self._generations.size
        generations = seals ^ _masks(names[which, 1], places)
        # Its writer is another process: nothing that it wrote is taken for granted.
        inside &= places >> _ORDER_SHIFT < _ORDERS
        right = inside & (self._generations.take(slots, mode="clip") == generations)
        which = which[right]
        found.slots[which] = slots[right]
        found.generations[which] = generations[right]
        found.orders[which] = places[right] >> _ORDER_SHIFT
        lacking: Bits = found.slots[left] == NO_SLOT
        return lacking

    def _find_one(self, key: bytes) -> FoundSlots:
        """Look up one block without arrays, which is several times faster."""
        first, second = divmod(xxh3_128_intdigest(key), 1 << 64)
        tag = first or 1
        for bucket in (tag & self._mask, second & self._mask):
            tags, places, seals = self._entries[bucket].tolist()
            if tag not in tags:
                continue
            way = tags.index(tag)
            place = places[way]
            generation = seals[way] ^ _mask(second, place)
            slot = place & _SLOT_MASK
            if (
                slot < self._generations.size
                and place >> _ORDER_BIT < len(ORDERS)
                and self._generations.item(slot) == generation
            ):
                return FoundSlots(
                    np.array((slot,), np.int64),
                    np.array((generation,), np.uint64),
                    np.array((place >> _ORDER_BIT,), np.uint8),
                )
        return NOTHING


def _names(keys: Keys) -> Array:
    """Return the name of each block, shape (keys, 2); no tag is 0."""
    joined = b"".join(map(xxh3_128_digest, keys.tolist()))
    names = np.frombuffer(joined, ">u8").astype(np.uint64).reshape(-1, 2)
    names[:, 0] += names[:, 0] == 0
    return names


def _masks(halves: Array, places: Array) -> Array:
    """Return the mask of each generation.

    Changing any bit of a place changes bits everywhere, so that no change of a few
    bytes in the seal can compensate for it.
    """
    mixed = halves + places * np.uint64(_MIX)
    mixed ^= mixed >> np.uint64(_FOLD)
    mixed *= np.uint64(_MIX)
    mixed ^= mixed >> np.uint64(_FOLD)
    return mixed


def _mask(half: int, place: int) -> int:
    mixed = (half + place * _MIX) & _ALL_BITS
    mixed = (mixed ^ mixed >> _FOLD) * _MIX & _ALL_BITS
    return mixed ^ mixed >> _FOLD


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _keeps_order() -> bool:
    try:
        require_order()
    except BackendUnavailable:
        return False
    return True


_FENCE: Final = threading.Lock()
# Whether processors see each other's stores and loads in program order.
_KEEPS_ORDER: Final = _keeps_order()
_YES: Final[Bits] = np.ones(1, np.bool_)
_NO: Final[Bits] = np.zeros(1, np.bool_)
_NO_SLOTS: Final = np.empty(0, np.int64)
NOTHING: Final = FoundSlots(
    np.array((NO_SLOT,), np.int64), np.zeros(1, np.uint64), np.zeros(1, np.uint8)
)
