"""The first tier: slots in one arena, through which every block of a store passes.

A put copies from a cache into slots, and a get from slots into a cache. Moves from and
to the lower tiers use slots too. So a block that was read from a disk is in memory
already, and an evicted block is contiguous for the tier that stores it.

Room
----
:meth:`MemoryTier.take` returns free slots, or the slots of evicted blocks. Blocks that
no lower tier has are written to one before they are evicted. Meanwhile they are pinned
and can still be found, and a block that is used again stays. If there is a lower tier,
a part of memory is kept free in the background, so that a put rarely waits for such a
write. No other memory is needed: blocks on their way down stay in their slots. If every
put is written through, eviction need not wait: blocks that a lower tier has are evicted
when room is needed, and a few more at the same time.

If every slot is pinned, ``take`` waits. Its caller must not hold any pin: then all pins
belong to running copies, reads and writes, so some slot will be freed.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvwire.aio import start_task
from kvwire.kv.blocks import Bits, Ids, all_of
from kvwire.kv.fragments import Array, Fragments, Payload
from kvwire.memory.arena import Arena, may_share
from kvwire.memory.buffers import mid_page_memory, slice_payload
from kvwire.memory.copy import copy
from kvwire.memory.generations import Generations
from kvwire_store.images import rows
from kvwire_store.index import Index
from kvwire_store.keys import (
    IndexedSlots,
    Key,
    Keys,
    Orders,
    absent,
    all_found,
    as_keys,
    once,
)
from kvwire_store.limits import (
    STORE_BATCH_BYTES,
    STORE_HEADROOM_BYTES,
    STORE_NAMESPACES_TOLD,
    STORE_SLABS,
)
from kvwire_store.shared_index import SharedIndex, words_for
from kvwire_store.tiers.base import TierStats
from kvwire_store.tiers.slabs import rounded

logger: logging.Logger = logging.getLogger("kvwire.store")

_Bytes = npt.NDArray[np.uint8]


class LowerTiers(Protocol):
    """The tiers below memory, as it uses them."""

    async def demote(self, named: IndexedSlots) -> str:
        """Write blocks to tiers that lack them; return why some were refused.

        Cancel safety: running writes are finished first.
        """

    def known_kept(self, keys: Keys, slots: Ids) -> Bits:
        """Return which blocks have been kept there, without asking a tier."""


class MemoryTier:
    """Manages the slots of a store's memory. One event loop."""

    def __init__(
        self, index: Index, lower: LowerTiers | None, *, ahead: bool = True
    ) -> None:
        self.index: Index = index
        slabs = index.slabs
        # Whether blocks that a lower tier has stay here after a call.
        self.keeps: bool = True
        self.in_flight: InFlightFills = InFlightFills()
        # Blocks being deleted; their deletion waits until no call uses them.
        self._leaving = InFlightFills()
        self._busy = (self.in_flight, self._leaving)
        self.counts: TierStats = TierStats(size_bytes=len(slabs) * slabs.slab_bytes)
        # By slot: whether a lower tier kept the block when it arrived.
        self.below: Bits = np.zeros(slabs.slots, np.bool_)
        # By slot: whether the block should be in a lower tier, but none has accepted
        # it.
        self.untaken: Bits = np.zeros(slabs.slots, np.bool_)
        self._arena, self._bytes = self._allocate(self.counts.size_bytes)
        # Called by `close`, or if the store is dropped without being closed.
        self._release = (
            _releasing(self, self._arena) if self._arena is not None else None
        )
        # Has the type of the numbers that are added to it; see `images`.
        self._base = np.int64(self._bytes.ctypes.data)
        self._shared: SharedMemory | None = None
        # bounded: STORE_INLINE_BYTES
        self._line = memoryview(b"")
        self._headroom_bytes = min(
            STORE_HEADROOM_BYTES, self.counts.size_bytes // STORE_SLABS
        )
        # Whether room is made before it is needed; otherwise more is evicted than
        # needed.
        self._ahead = lower is not None and ahead
        through = lower is not None and not ahead
        self._more_bytes = self._headroom_bytes // 4 if through else 0
        self._lower = lower
        self._logged: set[str] = set()
        # Whether no lower tier accepted the last evicted blocks.
        self._losing = False
        # Set and removed when room may have become free; created by the calls that
        # wait.
        self._changed: asyncio.Event | None = None
        self._clearing: asyncio.Task[None] | None = None

    def share(self) -> SharedMemory | None:
        """Start an index that other processes can map, and return it.

        Returns:
            None if memory cannot be shared here. The same object at each call.

        Raises:
            BackendUnavailable: This processor needs compiled functions for it.
            OSError: There is no memory for it.
        """
        if self._arena is None:
            return None
        if self._shared is None:
            self._shared = SharedMemory(self._bytes, self.index.slabs.slots)
            shared = SharedIndex(self._shared.words, self._shared.generations)
            named = self.index.named()
            shared.add(*named, self.index.orders(named.slots))
            self.index.shared = shared
        return self._shared

    def orders(self, keys: Keys) -> Orders:
        """Return the order of each block's image, or ``ABSENT``."""
        slots = self.index.find(keys)
        if all_found(slots):
            return self.index.orders(slots)
        orders = absent(keys.size)
        here = slots >= 0
        orders[here] = self.index.orders(slots[here])
        return orders

    def images(self, slots: Ids, nbytes: int) -> Fragments:
        """Return the images in some slots, one fragment each."""
        addresses = self.index.slabs.begins[slots] + self._base
        lengths, starts = rows(slots.size, nbytes)
        return Fragments(
            addresses.view(np.uint64),
            lengths,
            owner=self._bytes,
            writable=True,
            starts=starts,
        )

    def line(self, slots: Ids, nbytes: int) -> memoryview:
        """Return the images in some slots, one after the other, to be read at once.

        At most ``STORE_INLINE_BYTES`` of them; the next call may overwrite them.
        """
        images = self._place(slots, nbytes)
        if isinstance(images, memoryview):
            return images
        if images.nbytes > self._line.nbytes:
            # New memory for each answer would be faulted in page by page.
            self._line = mid_page_memory(images.nbytes).data
        line = self._line[: images.nbytes]
        copy(images, line)
        return line

    def too_large(self, nbytes: int, tenant: int = 0) -> str:
        """Return why a block of ``nbytes`` does not fit here, or ""."""
        if self.index.fits(nbytes, tenant):
            return ""
        slab_bytes = self.index.slabs.slab_bytes
        if nbytes <= slab_bytes:
            return (
                f"a block of {nbytes} bytes, which takes {rounded(nbytes)}, is more "
                "than half of what its tenant may have in memory"
            )
        return (
            f"a block of {nbytes} bytes has no room in a slab of {slab_bytes} bytes of "
            f"the memory tier; give it memory:SIZE?slab= of several blocks"
        )

    def log_once(self, why: str) -> None:
        """Log why blocks are not kept here, each reason once."""
        if why not in self._logged and len(self._logged) < STORE_NAMESPACES_TOLD:
            self._logged.add(why)  # bounded: STORE_NAMESPACES_TOLD
            logger.warning("the store could not keep these blocks: %s", why)

    async def take(self, nbytes: int, count: int, tenant: int = 0) -> Ids:
        """Take slots for blocks of ``nbytes``. The caller must not hold pins meanwhile.

        Returns:
            1 to ``count`` slots, ascending, each pinned.

        Cancel safety: safe, nothing stays taken, and the blocks to be evicted stay.
        """
        while True:
            slots = self.index.take(nbytes, count, tenant)
            if slots.size == count:
                break
            if news := self.index.slabs.news_of(nbytes):
                logger.warning("the memory tier lacks room: %s", news)
            # Under a tenant's quota only its own blocks go, so no more than necessary.
            more_bytes = 0 if tenant or self._losing else self._more_bytes
            lacking = count - slots.size
            needed = max(lacking, more_bytes // nbytes)
            try:
                more = await self._evict(nbytes, needed, tenant, take=lacking)
            except BaseException:
                self.give_back(slots)
                raise
            if more is not None:
                slots = np.concatenate((slots, more)) if slots.size else more
                slots.sort()
            if slots.size:
                break
            if more is None:
                # There was no await since the lookup found no room.
                changed = self._changed = self._changed or asyncio.Event()
                await changed.wait()
        if self._ahead:
            self._keep_headroom(nbytes)
        self.below[slots] = self.untaken[slots] = False
        return slots

    def take_now(self, nbytes: int, count: int, tenant: int = 0) -> Ids:
        """Take up to ``count`` slots that need no waiting; each is pinned.

        With lower tiers, blocks are evicted for them only if one of these is known to
        have them.
        """
        slots = self.index.take(nbytes, count, tenant)
        if slots.size < count and not self._ahead:
            if news := self.index.slabs.news_of(nbytes):
                logger.warning("the memory tier lacks room: %s", news)
            lacking = count - slots.size
            more_bytes = 0 if tenant else self._more_bytes
            needed = max(lacking, more_bytes // nbytes)
            named = self.index.victims(nbytes, needed, tenant)
            lower = self._lower
            may_go = lower is None or all_of(lower.known_kept(*named))
            if may_go and named.slots.size:
                more = self.index.replace(*named, nbytes, lacking, tenant)
                slots = np.concatenate((slots, more)) if slots.size else more
                slots.sort()
            else:
                self.unpin(named.slots[::-1])
        if self._ahead:
            self._keep_headroom(nbytes)
        self.below[slots] = self.untaken[slots] = False
        return slots

    def fill_now(
        self,
        keys: Keys,
        images: Payload,
        nbytes: int,
        tenant: int,
        orders: Orders | int,
        *,
        born: float | None = None,
        below: Bits | bool = False,
        whole: bool = False,
    ) -> int:
        """Copy blocks that are not here into slots that need no waiting.

        If there is not room for all, those at the head of the chain stay; if the
        ``whole`` chain has to be here, none.

        Args:
            keys: The blocks' keys, each once.
            images: Their images, one after the other.
            nbytes: The bytes of an image.
            tenant: The number of the tenant that owns them.
            orders: The order of each image, or of all.
            born: When they were put; None for now.
            below: Whether a lower tier has kept each, or all.
            whole: Whether the caller wants all of them or none.

        Returns:
            The number of blocks that have room.
        """
        taken = self.take_now(nbytes, keys.size, tenant)
        count = taken.size
        if not count or (whole and count < keys.size):
            self.give_back(taken)
            return 0
        try:
            come = slice_payload(images, 0, count * nbytes)
            copy(come, self._place(taken, nbytes))
        except BaseException:
            self.give_back(taken)
            raise
        self.below[taken] = below if isinstance(below, bool) else below[:count]
        known = orders if isinstance(orders, int) else orders[:count]
        self.index.name(keys[:count], taken, born, known)
        self.unpin(taken)
        return count

    def give_back(self, slots: Ids) -> None:
        """Free taken slots that will not get a key."""
        if slots.size:
            self.index.give_back(slots)
            self._notify()

    def unpin(self, slots: Ids) -> None:
        """Unpin slots that have a key."""
        self.index.unpin(slots)
        if self._changed is not None:
            self._notify()

    def passed(self, keys: Keys, slots: Ids) -> None:
        """Let go of a call's blocks, which a lower tier has, unless they stay here."""
        if not self.keeps:
            # First, the calls that have waited for one of these blocks pin it.
            asyncio.get_running_loop().call_soon(self._let_go, keys, slots)

    async def delete(self, keys: Keys) -> None:
        """Delete blocks, once running reads and writes of them have ended.

        Cancel safety: safe, it may be called again.
        """
        keys = keys[once(keys)]
        while any([await busy.one_ended(keys) for busy in self._busy]):
            continue
        slots = self.index.delete(keys)
        self._notify()
        self._leaving.begin(keys)
        try:
            while self.index.doomed(slots):
                changed = self._changed = self._changed or asyncio.Event()
                await changed.wait()
        finally:
            self._leaving.end(keys)

    async def delete_namespace(self, digest: bytes) -> None:
        """Delete every block of a namespace.

        Cancel safety: safe, it may be called again.
        """
        await self.delete(self.of_namespace(digest))

    def of_namespace(self, digest: bytes) -> Keys:
        """Return the blocks of a namespace that are here, arriving or being deleted."""
        known = [one.of_namespace(digest) for one in (*self._busy, self.index)]
        return np.concatenate(known)

    def has_any(self, keys: Keys) -> bool:
        """Return whether any of these blocks is here or arriving."""
        names = keys.tolist()
        filling = self.in_flight.ends
        return not (
            self.index.names.isdisjoint(names) and filling.keys().isdisjoint(names)
        )

    def stats(self) -> TierStats:
        """Return the tier's content, in numbers."""
        self.counts.blocks = len(self.index)
        self.counts.used_bytes = self.index.slabs.used_bytes
        self.counts.evicted_blocks = self.index.evicted
        return self.counts

    async def settle(self) -> None:
        """Wait until no eviction runs in the background.

        Cancel safety: safe, it only watches.
        """
        if self._clearing is not None:
            await asyncio.wait((self._clearing,))

    async def write_down(self, *, every: bool) -> int:
        """Write blocks to the tiers below that lack them; they stay here as well.

        Args:
            every: Write all blocks here, not only those that every tier below refused.

        Returns:
            The number of blocks that no tier below has taken.

        Cancel safety: running writes are finished first.
        """
        if self._lower is None:
            return 0
        left = 0
        here = self.index.named()
        wanted = here.keys if every else here.keys[self.untaken[here.slots]]
        step = max(1, STORE_BATCH_BYTES // max(self.index.sizes, default=1))
        for first in range(0, wanted.size, step):
            keys = wanted[first : first + step]
            slots = self.index.find(keys)
            named = IndexedSlots(keys[slots >= 0], slots[slots >= 0])
            self.index.pin(named.slots)
            try:
                await self._lower.demote(named)
                left += int(np.count_nonzero(self.untaken[named.slots]))
            finally:
                self.unpin(named.slots)
        return left

    async def empty(self) -> None:
        """Evict everything to the tiers below; call it only while nothing is in use.

        Cancel safety: safe, it may be called again.
        """
        self.index.unkeep(self.index.named().slots)
        for nbytes in self.index.sizes:
            step = max(1, STORE_BATCH_BYTES // nbytes)
            while await self._evict(nbytes, step) is not None:
                continue

    def populate(self) -> None:
        """Touch all pages of the memory now. On a thread, before the first block."""
        if self._arena is not None:
            self._arena.populate()

    def close(self) -> None:
        """Free the memory; none of it may be in use."""
        self._bytes = np.empty(0, np.uint8)
        if self._arena is None:
            return
        if self._shared is not None:
            self.index.shared = None
            self._shared.close()
        self._arena = None
        assert self._release is not None, "it comes with an arena"
        if self._release() is False:
            # An exception that is still referenced refers to frames that use the
            # memory.
            logger.warning(
                "%d bytes of a store's memory stay in use", self.counts.size_bytes
            )

    # --- inside -----------------------------------------------------------------------

    def _let_go(self, keys: Keys, slots: Ids) -> None:
        """Forget blocks that are still in these slots, unless they were pinned."""
        same = (self.index.find(keys) == slots) & ~self.index.kept(keys)
        self.index.delete(keys[same])
        self._notify()

    def _place(self, slots: Ids, nbytes: int) -> Payload:
        """Return the images in some slots: one view, if they are side by side."""
        if slots.size == 1:
            begin = self.index.slabs.begins.item(slots.item(0))
            return self._bytes[begin : begin + nbytes].data
        begins = self.index.slabs.begins[slots].tolist()
        begin = begins[0]
        total = nbytes * len(begins)
        if begins == list(range(begin, begin + total, nbytes)):
            return self._bytes[begin : begin + total].data
        return self.images(slots, nbytes)

    @staticmethod
    def _allocate(nbytes: int) -> tuple[Arena | None, _Bytes]:
        """Allocate memory that processes of this host can map, if possible."""
        if not may_share():
            return None, np.zeros(nbytes, np.uint8)
        arena = Arena(nbytes, name="kvwire-store")
        memory: npt.NDArray[Any] = arena.buffer(nbytes)
        return arena, memory

    async def _evict(
        self,
        nbytes: int,
        count: int,
        tenant: int = 0,
        *,
        take: int = 0,
        lose: bool = True,
    ) -> Ids | None:
        """Evict blocks, and take up to ``count`` of the slots that this frees.

        Without ``lose``, blocks that no lower tier has accepted stay.

        Returns:
            The slots taken; None if none can have become free.
        """
        # Pinned until their images are in a lower tier or dropped, so that no slot is
        # reused while a tier reads it.
        named = self.index.victims(nbytes, count, tenant)
        if not named.slots.size:
            return None
        kept = True
        try:
            error = "" if self._lower is None else await self._lower.demote(named)
            self._losing = bool(error)
            kept = self._losing and not lose
        finally:
            if kept:  # they may be nowhere else
                self.unpin(named.slots[::-1])
        if kept:
            return None
        taken = self.index.replace(*named, nbytes, take, tenant)
        if self._changed is not None:
            self._notify()
        return taken

    def _keep_headroom(self, nbytes: int) -> None:
        """Start to free some room, unless there is enough or this runs already."""
        if self._lacks_headroom(nbytes) and (
            self._clearing is None or self._clearing.done()
        ):
            self._clearing = start_task(self._clear(nbytes))

    async def _clear(self, nbytes: int) -> None:
        step = max(1, self._headroom_bytes // 4 // nbytes)
        while self._lacks_headroom(nbytes):
            # No call waits for this room, so it is not worth losing a block.
            if await self._evict(nbytes, step, lose=False) is None:
                return

    def _lacks_headroom(self, nbytes: int) -> bool:
        size = rounded(nbytes)
        return self.index.slabs.free(size) * size < self._headroom_bytes

    def _notify(self) -> None:
        """Wake the calls that wait for room."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None


class SharedMemory:
    """A store's memory, index and generations, which other processes may map.

    Attributes:
        images: The memory of the slots.
        words: The index.
        generations: The generation of each slot.
    """

    def __init__(self, images: _Bytes, slots: int) -> None:
        count = words_for(slots)
        self.images: _Bytes = images
        self.generations: Generations = Generations(slots)
        arena = Arena(8 * count, name="kvwire-store-index")
        self.words: Array = arena.numpy(count, np.uint64)
        self._release = _releasing(self, arena)

    @property
    def regions(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the memory that is mapped, in the order of a server's windows."""
        return self.images, self.words, self.generations.values

    def close(self) -> None:
        """Withdraw all blocks, and free the index; other processes' mappings stay."""
        self.generations.close()
        self.images = np.empty(0, np.uint8)
        self.words = np.empty(0, np.uint64)
        self._release()


def _releasing(owner: object, arena: Arena) -> weakref.finalize[[], object]:
    """Release an arena when its owner is collected, or when this is called."""
    release = weakref.finalize(owner, arena.release)
    release.atexit = False
    return release


class InFlightFills:
    """Tracks the keys whose slots are being filled, on one event loop.

    A fill waits only for a copy or a disk, never for room or for another fill. So every
    wait for a fill ends, whether or not the waiting call holds pins.

    Attributes:
        begun: The number of fills so far; if unchanged, no block has arrived in memory.
        ends: For each key being filled, the event that is set at the end of its fill.
        hurry: Ends fills that are put off, for a call that needs one of their blocks.
    """

    def __init__(self) -> None:
        self.begun: int = 0
        self.ends: dict[Key, asyncio.Event] = {}
        self.hurry: Callable[[], object] = lambda: None
        # Those of ``ends`` that calls wait for.
        self._awaited: set[asyncio.Event] = set()

    def __len__(self) -> int:
        """Return the number of blocks that are being filled."""
        return len(self.ends)

    def busy(self, keys: Keys) -> Bits:
        """Return which of these blocks are being filled."""
        found = map(self.ends.__contains__, keys.tolist())
        return np.fromiter(found, np.bool_, keys.size)

    def of_namespace(self, digest: bytes) -> Keys:
        """Return the blocks of a namespace that are being filled."""
        return as_keys(key for key in self.ends if key.startswith(digest))

    def begin(self, keys: Keys) -> None:
        """Record that the caller fills blocks that no other call is filling."""
        self.begun += 1
        self.ends.update(zip(keys.tolist(), repeat(asyncio.Event())))

    def end(self, keys: Keys) -> None:
        """End the fills of one :meth:`begin`, filled or not."""
        if keys.size:
            ends = list(map(self.ends.pop, keys.tolist()))
            ends[0].set()
            self._awaited.discard(ends[0])

    def awaited(self, keys: Keys) -> bool:
        """Return whether calls wait for the fills of one :meth:`begin`."""
        return bool(self._awaited) and self.ends[keys.item(0)] in self._awaited

    async def one_ended(self, keys: Keys) -> bool:
        """Wait for the end of the fill of one of these blocks, if one is being filled.

        Cancel safety: safe, it only watches.
        """
        for key in keys.tolist():
            if key in self.ends:
                self.hurry()
                if key in self.ends:
                    end = self.ends[key]
                    self._awaited.add(end)  # bounded: one for each begin
                    await end.wait()
                return True
        return False
