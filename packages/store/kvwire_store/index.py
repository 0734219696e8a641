"""The index of a tier: the block in each slot, and the order of eviction.

Theory
------
A key names a block: the digest of its namespace (see :mod:`kvwire_store.namespace`) and
its hash. A slot is *free*, *taken* (it is being filled, and has no name yet), or
*named*. A slot that is taken, read or written back is *pinned* once for each user, and
is not evicted meanwhile.

Each tenant and slot size has a queue of unpinned named slots, with the next slot to
evict in front (:mod:`kvwire_store.eviction`). A call releases
its slots in reverse order of its keys, which are a chain's from the head on. So a
chain's tail is evicted before its head, without which the tail is worthless.

A size without free slots takes a slab of another size if the whole slab is older than
every block of its own size. So an unused model makes room, and an active model does not
lose a slab to a single block of another.

Queues are NumPy arrays of slots, and every call loops over its keys in C code. Each
call is O(1) per block on average, however many blocks the tier holds.

Each slot has the number of a tenant (:mod:`kvwire_store.tenants`). A tenant that has
reached its quota evicts its own blocks. A block older than its tenant's time to live is
deleted when it is looked up, or when room is needed. A *kept* slot has an additional
pin, until it is unkept or deleted, or its time ends. A bound limits the blocks that a
tenant keeps. A deleted slot has no name; if it is in use, it is *doomed*, and becomes
free when its last user releases it.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, KeysView
from functools import lru_cache, partial
from itertools import repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from kvwire.kv.blocks import Bits, Ids, all_of, any_of
from kvwire_store.eviction import EvictionQueue, SlotState, each
from kvwire_store.keys import NO_SLOT, IndexedSlots, Key, Keys, Orders, Times, as_keys
from kvwire_store.placement import BlockState, Placement, Placing, Verb, VerbKind
from kvwire_store.shared_index import SharedIndex
from kvwire_store.tenants import Shares
from kvwire_store.tiers.slabs import GRAIN_BYTES, Slabs, rounded

# Of the same type as pins: NumPy casts other types in each call, which takes 5 times as
# long and lets another thread take the GIL.
_ONE: Final = np.int32(1)

_ALL: Final = slice(None)

# So few slots are released one by one.
_FEW: Final = 4

# A search takes tens of milliseconds on a disk of 100 GiB, and each put may need room.
_LOOKS_APART_S: Final = 1.0

_BOUND: Final = "its tenant may pin no more here"

# There are few block sizes, and it is called for each block.
_size: Final = lru_cache(1024)(rounded)


class Index:
    """Finds the blocks of one tier. Pure, and not thread-safe.

    Attributes:
        evicted_blocks: Evicted blocks, by the number of their tenant.
        used_bytes: Bytes of the slots of each tenant.
        kept_bytes: Bytes of each tenant's kept slots.
        now: Returns the time in seconds, by which blocks expire.
        unnamed: Collects the slots that have lost their names; None to collect none.
        shared: Shows other processes on this host which slot has which block; None if
            not shared.
    """

    __slots__ = (
        "_born",
        "_clock",
        "_doomed",
        "_kept",
        "_looked_at",
        "_newest",
        "_orders",
        "_owner",
        "_pins",
        "_queues",
        "_slots",
        "_state",
        "_used_at",
        "evicted_blocks",
        "kept_bytes",
        "now",
        "shared",
        "shares",
        "slabs",
        "unnamed",
        "used_bytes",
    )

    def __init__(
        self,
        slabs: Slabs,
        shares: Shares | None = None,
    ) -> None:
        self.slabs: Slabs = slabs
        self.shares: Shares = shares or Shares.of_all(len(slabs) * slabs.slab_bytes)
        tenants = len(self.shares)
        self.evicted_blocks: npt.NDArray[np.int64] = np.zeros(tenants, np.int64)
        self.used_bytes: npt.NDArray[np.int64] = np.zeros(tenants, np.int64)
        self.kept_bytes: npt.NDArray[np.int64] = np.zeros(tenants, np.int64)
        self.unnamed: set[int] | None = None
        self.shared: SharedIndex | None = None
        self._slots: dict[Key, int] = {}
        self._state = SlotState(slabs.slots)
        # By slot size, then by tenant.
        new_queue = partial(EvictionQueue, self._state)
        self._queues: defaultdict[int, defaultdict[int, EvictionQueue]] = defaultdict(
            partial(defaultdict, new_queue)
        )
        self._orders = np.zeros(slabs.slots, np.uint8)
        self._owner = np.zeros(slabs.slots, np.uint8)
        self._pins = Pins(slabs.slots)
        self._kept = self._pins.on
        self._doomed = np.zeros(slabs.slots, np.bool_)
        # When each slot's block was put; 0 without a block.
        self._born = np.zeros(slabs.slots, np.float64)
        self._used_at = np.zeros(slabs.slots, np.int64)
        self._newest = np.zeros(len(slabs), np.int64)
        self._clock = 0
        self.now: Callable[[], float] = time.time
        self._looked_at = 0.0

    def __len__(self) -> int:
        """Return the number of blocks that have a name."""
        return len(self._slots)

    @property
    def evicted(self) -> int:
        """Return the number of evicted blocks."""
        return int(self.evicted_blocks.sum())

    @property
    def names(self) -> KeysView[Key]:
        """The keys of all blocks, those that have expired included."""
        return self._slots.keys()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return all slot sizes used so far."""
        return tuple(self._queues)

    def named(self) -> IndexedSlots:
        """Return every named block with its slot."""
        slots = np.fromiter(self._slots.values(), np.int64, len(self._slots))
        return IndexedSlots(as_keys(self._slots), slots)

    def find(self, keys: Keys) -> Ids:
        """Return the slot of each block, or ``NO_SLOT``; delete expired blocks."""
        if keys.size == 1:
            slots = np.array((self._slots.get(keys[0], NO_SLOT),), np.int64)
        else:
            listed = keys.tolist()
            if self._slots.keys().isdisjoint(listed):
                # A put's blocks mostly. It takes half as long, and ends at the first
                # block that is here.
                return np.full(keys.size, NO_SLOT, np.int64)
            found = map(self._slots.get, listed, repeat(NO_SLOT))
            slots = np.fromiter(found, np.int64, keys.size)
        if self.shares.expire and keys.size:
            late = (slots >= 0) & self.late(slots)
            if any_of(late):
                self.delete(keys[late])
                slots[late] = NO_SLOT
        return slots

    def orders(self, slots: Ids) -> Orders:
        """Return the order of each image; see :mod:`kvwire_store.namespace`."""
        return self._orders[slots]

    def born(self, slots: Ids) -> Times:
        """Return when the block of each slot was put, in seconds since 1970."""
        return self._born[slots]

    def fits(self, nbytes: int, tenant: int = 0) -> bool:
        """Return whether a block fits beside the blocks that tenants may keep."""
        half = self.shares.quota_bytes.item(tenant) // 2 // GRAIN_BYTES * GRAIN_BYTES
        return nbytes <= min(half, self.slabs.slab_bytes)

    def take(self, nbytes: int, count: int, tenant: int = 0, *, beyond: int = 0) -> Ids:
        """Take up to ``count`` free slots for blocks of ``nbytes``; each is pinned.

        ``beyond`` of them may exceed the tenant's quota.
        """
        size = _size(nbytes)
        left_bytes = self.shares.quota_bytes.item(tenant) - self.used_bytes.item(tenant)
        left_bytes += beyond * size
        slots = self.slabs.take(size, min(count, left_bytes // size))
        if slots.size < count and self.shares.expire and self._delete_late():
            left_bytes = self.shares.quota_bytes.item(tenant)
            left_bytes -= self.used_bytes.item(tenant) + slots.size * size
            more = min(count - slots.size, left_bytes // size)
            slots = np.concatenate((slots, self.slabs.take(size, more)))
            slots.sort()
        if not slots.size:
            return slots
        self._state.pins[slots] = 1
        self._owner[slots] = tenant
        self.used_bytes[tenant] += slots.size * size
        return slots

    def give_back(self, slots: Ids) -> None:
        """Free taken slots that will not be named."""
        if not slots.size:
            return
        sizes = self.slabs.slot_bytes[slots // self.slabs.stride]
        np.subtract.at(self.used_bytes, self._owner[slots], sizes)
        self._state.pins[slots] = 0
        self._born[slots] = 0.0
        self._doomed[slots] = False
        self.slabs.give(slots)

    def mark(self, slots: Ids, orders: Orders | int) -> None:
        """Set the order of the images in taken slots."""
        self._orders[slots] = orders

    def name(
        self,
        keys: Keys,
        slots: Ids,
        born: Times | float | None = None,
        orders: Orders | int | None = None,
    ) -> None:
        """Give taken slots their keys. They stay pinned by their users."""
        if orders is not None:
            self._orders[slots] = orders
        self._born[slots] = self.now() if born is None else born
        self._state.names[slots] = keys
        if slots.size == 1:
            self._slots[keys[0]] = slots.item(0)
        else:
            self._slots.update(zip(keys.tolist(), slots.tolist(), strict=True))
        if self.shared is not None:
            self.shared.add(keys, slots, self._orders[slots])

    def adopt(
        self,
        keys: Keys,
        slots: Ids,
        orders: Orders,
        owners: Ids | None = None,
        born: Times | None = None,
    ) -> None:
        """Name slots from an earlier run, of one size, most recently used first."""
        self._state.pins[slots] = 1
        self._owner[slots] = 0 if owners is None else owners
        sizes = self.slabs.slot_bytes[slots // self.slabs.stride]
        np.add.at(self.used_bytes, self._owner[slots], sizes)
        self.mark(slots, orders)
        self.name(keys, slots, born)
        self.unpin(slots)

    @property
    def pinned(self) -> int:
        """Count the slots that are in use now."""
        return int(np.count_nonzero(self._state.pins > self._kept))

    def pin(self, slots: Ids) -> None:
        """Pin named slots; a slot that is listed twice is pinned twice."""
        if slots.size == 1:
            self._state.pins[slots] += 1
        else:
            np.add.at(self._state.pins, slots, _ONE)
        for queue, which in self._queues_of(slots):
            queue.take_out(slots[which])

    def unpin(self, slots: Ids) -> None:
        """Unpin named slots; they become the most recent, a chain's head last."""
        pins = self._state.pins
        if slots.size == 1:
            slot = slots.item(0)
            assert pins.item(slot), "somebody has let go twice"
            pins[slot] -= 1
            if not pins.item(slot):
                if self._doomed.item(slot):
                    self.give_back(slots)
                else:
                    self._release(slots)
            return
        assert all_of(pins[slots]), "somebody has let go twice"
        np.subtract.at(pins, slots, _ONE)
        left = pins[slots] == 0
        numbers = slots[left][::-1]
        doomed = self._doomed[numbers]
        if any_of(doomed):
            self.give_back(np.unique(numbers[doomed]))
            numbers = numbers[~doomed]
        self._release(numbers)

    def touch(self, slots: Ids) -> None:
        """Mark named slots as just used; a slot may be listed several times."""
        if slots.size == 1 and not self._state.pins.item(slots.item(0)):
            self._release(slots)
            return
        pins = self._state.pins[slots]
        if any(pins.tolist()):
            slots = slots[pins == 0]
        self._release(slots[::-1])

    def victims(self, nbytes: int, count: int, tenant: int = 0) -> IndexedSlots:
        """Pin and return the blocks to evict next, to make room for ``nbytes``.

        Returns:
            Up to ``count`` blocks of that size, or all of a slab of another size; only
            the tenant's own if its quota is full; none if everything is pinned.
        """
        size = _size(nbytes)
        self.end_late()
        # A tenant at its quota evicts its own blocks, even if others have older ones.
        # Every branch pins the blocks that it returns once more.
        left_bytes = self.shares.quota_bytes.item(tenant) - self.used_bytes.item(tenant)
        if left_bytes < size:
            return self.own_victims(size, count, tenant)
        count = min(count, left_bytes // size)
        queue = self._first(self._queues[size].values())
        slab = self._older_slab(size, queue) if len(self._queues) > 1 else None
        if slab is not None:
            named = self._named_in(slab)
            self.pin(named.slots)
            return named
        return self._pinned(queue, count)

    def own_victims(self, size: int, count: int, tenant: int) -> IndexedSlots:
        """Pin and return a tenant's own blocks, to make room in its quota."""
        mine = {at: by[tenant] for at, by in self._queues.items() if tenant in by}
        own = mine.get(size)
        if own is not None and own.oldest() is not None:
            return self._pinned(own, count)
        queue = self._first(mine.values())
        of_size = next((at for at, one in mine.items() if one is queue), size)
        return self._pinned(queue, -(-count * size // of_size))

    def forget(self, keys: Keys, slots: Ids, *, evicted: bool = False) -> Bits:
        """Remove the names of blocks that only the caller has pinned.

        Returns:
            Which blocks lost their names and are still taken; the others were unpinned.
        """
        pins = self._state.pins
        # By lists first, which take a fraction of the time of arrays for a few blocks.
        if pins[slots].tolist().count(1) == slots.size and not any(
            self._doomed[slots].tolist()
        ):
            alone: Bits = np.empty(slots.size, np.bool_)
            alone.fill(True)  # np.ones is a function of Python
        else:
            alone = (pins[slots] == 1) & ~self._doomed[slots]
            # A second pin is a reader's: name and image stay until it unpins.
            kept = self._kept[slots] & (pins[slots] == 2)
            # Blocks that were chosen to make room but have been kept since then stay.
            if any_of(kept) and not evicted:
                self._unkeep(slots[kept])
                alone = (pins[slots] == 1) & ~self._doomed[slots]
            self.unpin(slots[~alone])
            keys = keys[alone]
            slots = slots[alone]
        each(map(self._slots.pop, keys.tolist()))
        if self.unnamed is not None or self.shared is not None:
            self._lost_names(slots)
        return alone

    def drop(self, keys: Keys, slots: Ids, *, evicted: bool = False) -> Bits:
        """Free blocks that only the caller has pinned; unpin the others."""
        alone = self.forget(keys, slots, evicted=evicted)
        gone = slots[alone]
        if evicted:
            np.add.at(self.evicted_blocks, self._owner[gone], 1)
        self.give_back(gone)
        return alone

    def replace(
        self, keys: Keys, slots: Ids, nbytes: int, count: int, tenant: int = 0
    ) -> Ids:
        """Evict pinned blocks, and take up to ``count`` slots, reusing theirs."""
        # Now the slots of ``gone`` have no names, and only the caller's pins.
        gone = slots[self.forget(keys, slots, evicted=True)]
        if self.used_bytes.size > 1 or not gone.size:
            np.add.at(self.evicted_blocks, self._owner[gone], 1)
            self.give_back(gone)
            return self.take(nbytes, count, tenant)
        self.evicted_blocks[0] += gone.size
        size = _size(nbytes)
        if self.slabs.slot_bytes.item(gone.item(0) // self.slabs.stride) != size:
            self.give_back(gone)
            return self.take(nbytes, count)
        # Slots of the right size go from the old blocks to the new ones. They stay
        # pinned, and counted as used, as if ``take`` had given them.
        mine = gone[:count]
        self._born[mine] = 0.0
        if gone.size > count:
            self.give_back(gone[count:])
        elif mine.size < count:
            mine = np.concatenate((mine, self.take(nbytes, count - mine.size)))
        mine.sort()
        return mine

    def overdrawn(self, nbytes: int, tenant: int) -> int:
        """Return how many blocks of ``nbytes`` a tenant has beyond its quota."""
        over = self.used_bytes.item(tenant) - self.shares.quota_bytes.item(tenant)
        return max(0, -(-int(over) // int(_size(nbytes))))

    def evictable(self, named: IndexedSlots) -> IndexedSlots:
        """Return the pinned blocks that nobody has kept since; unpin the others."""
        kept = self._kept[named.slots]
        self.unpin(named.slots[kept])
        return IndexedSlots(named.keys[~kept], named.slots[~kept])

    def part_with(self, keys: Keys, slots: Ids) -> None:
        """Evict blocks that the caller has pinned; those in use go when they are not.

        Another call may have deleted some of them since.
        """
        mine = ~self._doomed[slots]
        np.add.at(self.evicted_blocks, self._owner[slots[mine]], 1)
        self.delete(keys[mine])
        self.unpin(slots)

    def evict(self, nbytes: int, count: int, tenant: int = 0) -> IndexedSlots:
        """Evict the next blocks; their slots are free."""
        named = self.victims(nbytes, count, tenant)
        self.drop(*named, evicted=True)
        return named

    def trim(self) -> None:
        """Evict tenants' blocks beyond their quotas.

        A quota may be lower than at the last opening, or a killed put may have left
        entries of blocks that it had evicted.
        """
        over = self.used_bytes - self.shares.quota_bytes
        for tenant in np.flatnonzero(over > 0).tolist():
            while (
                excess := self.used_bytes[tenant] - self.shares.quota_bytes[tenant]
            ) > 0:
                named = self.own_victims(1, int(excess), tenant)
                if not named.slots.size:
                    break
                self.drop(*named, evicted=True)

    # --- what users say of blocks -----------------------------------------------------

    def delete(self, keys: Keys) -> Ids:
        """Remove the names of blocks, even if they are in use.

        Returns:
            The blocks' slots, which are free, or doomed while in use.
        """
        found = map(self._slots.pop, keys.tolist(), repeat(NO_SLOT))
        slots = np.fromiter(found, np.int64, keys.size)
        keys = keys[slots >= 0]
        slots = slots[slots >= 0]
        if self.unnamed is not None or self.shared is not None:
            self._lost_names(slots)
        for queue, which in self._queues_of(slots):
            queue.take_out(slots[which])
        self._unkeep(slots[self._kept[slots]])
        used = self._state.pins[slots] > 0
        self._doomed[slots[used]] = True
        self.give_back(slots[~used])
        return slots

    def doomed(self, slots: Ids) -> bool:
        """Return whether any of these is deleted and still in use."""
        return bool(any_of(self._doomed[slots]))

    def keep(self, keys: Keys, slots: Ids, until: float = math.inf) -> Bits:
        """Protect named blocks from eviction, within their tenants' limits.

        Args:
            keys: The blocks.
            slots: Their slots, each once.
            until: When the protection ends, in seconds since 1970; the latest of
                several ends counts.

        Returns:
            Which of the blocks are kept now.
        """
        self.end_late()
        kept = self._kept[slots]
        new = (~kept).nonzero()[0]
        some = new[self._affordable(slots[new])]
        sizes = self.slabs.slot_bytes[slots[some] // self.slabs.stride]
        np.add.at(self.kept_bytes, self._owner[slots[some]], sizes)
        kept[some] = True
        self._pins.begin(slots[kept], until)
        self.pin(slots[some])
        return kept

    def end_late(self) -> None:
        """End the expired pins."""
        if self._pins.next < math.inf and self._pins.next <= (now := self.now()):
            self.unkeep(self._pins.late(now))

    def kept(self, keys: Keys) -> Bits:
        """Return which blocks are here and kept."""
        self.end_late()
        slots = self.find(keys)
        kept: Bits = (slots >= 0) & self._kept[slots]
        return kept

    def unkeep(self, slots: Ids) -> None:
        """Allow kept blocks to be evicted again; each is listed once."""
        kept = self._kept[slots]
        self._state.pins[slots[kept]] += 1
        self._unkeep(slots[kept])
        self.unpin(slots[kept])

    def restore_pins(self, keys: Keys, before: Keys, ends: Times) -> None:
        """Undo a pin: only the keys that were kept before stay so, until ``ends``."""
        slots = self.find(before)
        kept = (slots >= 0) & self._kept[slots]
        earlier = set(before[kept].tolist())
        new = np.fromiter((key not in earlier for key in keys), np.bool_, keys.size)
        found = self.find(keys[new])
        self.unkeep(found[found >= 0])
        self._pins.until[slots[kept]] = ends[kept]
        self._pins.next = min(self._pins.next, *ends.tolist(), math.inf)

    def of_namespace(self, digest: bytes) -> Keys:
        """Return every named block of a namespace."""
        return as_keys(key for key in self._slots if key.startswith(digest))

    def apply(self, verb: Verb, keys: Keys) -> Placement:
        """Pin or unpin the present blocks; each key occurs once."""
        slots = self.find(keys)
        placing = Placing(keys.size)
        here = (slots >= 0).nonzero()[0]
        named = IndexedSlots(keys[here], slots[here])
        done = np.ones(here.size, np.bool_)
        if verb.kind is VerbKind.PIN:
            until = self.now() + verb.ttl_s if verb.ttl_s else math.inf
            done = self.keep(*named, until)
        else:
            self.unkeep(named.slots)
        placing.rule(here[done], BlockState.DONE)
        placing.rule(here[~done], BlockState.CLIPPED, _BOUND)
        return placing.end()

    def ends(self, slots: Ids) -> Times:
        """Return when the protection of kept slots ends; infinity for never."""
        ends: Times = self._pins.until[slots]
        return ends

    # --- inside -----------------------------------------------------------------------

    def _affordable(self, slots: Ids) -> Bits:
        """Return the slots that their tenants may still protect."""
        sizes = self.slabs.slot_bytes[slots // self.slabs.stride]
        owners = self._owner[slots]
        room = np.zeros(slots.size, np.bool_)
        kept = self.kept_bytes.copy()
        for tenant in np.unique(owners).tolist():
            mine = owners == tenant
            left = self.shares.pinned_bytes[tenant] - kept[tenant]
            all_left = self.shares.pinned_bytes.max() - kept.sum()
            room[mine] = sizes[mine].cumsum() <= min(left, all_left)
            kept[tenant] += sizes[mine & room].sum()
        return room

    def _lost_names(self, slots: Ids) -> None:
        """Record that these slots lost their names, unchanged."""
        if self.unnamed is not None:
            self.unnamed.update(slots.tolist())
        if self.shared is not None and slots.size:
            self.shared.remove(slots)

    def _unkeep(self, slots: Ids) -> None:
        """Remove the extra pin of kept slots, without changing their queues."""
        sizes = self.slabs.slot_bytes[slots // self.slabs.stride]
        np.subtract.at(self.kept_bytes, self._owner[slots], sizes)
        self._pins.end(slots)
        self._state.pins[slots] -= 1

    def late(self, slots: Ids | slice) -> Bits:
        """Return the slots with blocks past their tenant's time to live."""
        born = self._born[slots]
        ttl_s = self.shares.ttl_s[self._owner[slots]]
        late: Bits = (born > 0) & (ttl_s > 0) & (born + ttl_s <= self.now())
        return late

    def _delete_late(self) -> bool:
        """Delete expired blocks, at most once a second; return whether any were."""
        now = self.now()
        if abs(now - self._looked_at) < _LOOKS_APART_S:
            return False
        self._looked_at = now
        late = self.late(_ALL) & ~self._doomed
        if not any_of(late):
            return False
        named = self.named()
        return bool(self.delete(named.keys[late[named.slots]]).size)

    def _first(self, queues: Collection[EvictionQueue]) -> EvictionQueue | None:
        """Return the queue with the least recently used front."""
        if len(queues) == 1:
            return next(iter(queues))
        first = None
        before = math.inf
        for queue in queues:
            at = queue.oldest()
            if at is not None and self._used_at.item(at) < before:
                first = queue
                before = self._used_at.item(at)
        return first

    def _pinned(self, queue: EvictionQueue | None, count: int) -> IndexedSlots:
        """Pin and return the next blocks of a queue."""
        if queue is None:
            return IndexedSlots(as_keys(()), np.empty(0, np.int64))
        keys, slots = queue.pop(count)
        self._state.pins[slots] = 1
        return IndexedSlots(keys, slots)

    def _queues_of(self, slots: Ids) -> list[tuple[EvictionQueue, Bits | slice]]:
        """Return the queues of slots, each with its slots."""
        if not slots.size:
            return []
        sizes = self.slabs.slot_bytes[slots // self.slabs.stride]
        owners = self._owner[slots]
        if all_of(sizes == sizes[0]) and all_of(owners == owners[0]):
            return [(self._queues[sizes.item(0)][owners.item(0)], _ALL)]
        return [
            (self._queues[size][owner], (sizes == size) & (owners == owner))
            for size, owner in set(zip(sizes.tolist(), owners.tolist(), strict=True))
        ]

    def _release(self, slots: Ids) -> None:
        """Move unpinned slots to the back of their queues, in order."""
        # The head of a chain is a moment younger than what follows it.
        before = self._clock
        self._clock += slots.size
        if slots.size <= _FEW:  # without arrays, which take several times as long
            for at, slot in enumerate(slots.tolist(), before + 1):
                slab = slot // self.slabs.stride
                of_size = self._queues[self.slabs.slot_bytes.item(slab)]
                of_size[self._owner.item(slot)].release_one(slot)
                self._used_at[slot] = at
                self._newest[slab] = self._clock
            return
        for queue, which in self._queues_of(slots):
            queue.release(slots[which])
        self._used_at[slots] = self._clock - np.arange(slots.size)[::-1]
        self._newest[slots // self.slabs.stride] = self._clock

    def _older_slab(self, slot: int, own: EvictionQueue | None) -> int | None:
        """Return a slab of another size that is older than this size's oldest block."""
        slabs = self.slabs
        pins = self._state.pins
        others = ((slabs.slot_bytes != slot) & (slabs.slot_bytes > 0)).nonzero()[0]
        if not others.size or not slabs.capacity(slot):
            return None
        front = own.oldest() if own is not None else None
        oldest = self._clock + 1 if front is None else self._used_at[front]
        older = others[self._newest[others] < oldest]
        ordered = older[np.argsort(self._newest[older])].tolist()
        for slab in ordered:
            # A slab changes its size as a whole: one pinned slot keeps all of it.
            begin = slab * slabs.stride
            if not any_of(pins[begin : begin + slabs.stride]):
                return int(slab)
        own_slabs = (slabs.slot_bytes == slot).nonzero()[0].tolist()
        if front is not None or not all(map(self._unused, own_slabs)):
            return None
        # No slot of this size will be released, and the caller would wait for ever; so
        # kept blocks do not protect a slab.
        for slab in filter(self._unused, ordered):
            self.unkeep(self._named_in(slab).slots)
            return int(slab)
        return None

    def _unused(self, slab: int) -> bool:
        """Return whether nothing in a slab is in use; kept blocks may be."""
        inside = slice(slab * self.slabs.stride, (slab + 1) * self.slabs.stride)
        return bool(all_of(self._state.pins[inside] == self._kept[inside]))

    def _named_in(self, slab: int) -> IndexedSlots:
        """Return the named blocks of a slab."""
        named = self.named()
        inside = named.slots // self.slabs.stride == slab
        return IndexedSlots(named.keys[inside], named.slots[inside])


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
