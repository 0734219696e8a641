"""A put: from a cache into memory, then to the lower tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from kvwire.kv.blocks import Bits, Ids, any_of
from kvwire.kv.plan import PlanSide
from kvwire_store.counters import StoreCounters
from kvwire_store.keys import NO_SLOT, once
from kvwire_store.limits import STORE_UNASKED_BYTES
from kvwire_store.operations.base import Operation
from kvwire_store.tier_stack import UNSAID, TierStack
from kvwire_store.tiers.base import LANDED, Batch

if TYPE_CHECKING:
    from kvwire_store.operations.group_request import BlockRequest


NO_SLOTS: Final = np.empty(0, np.int64)
"""No slots were taken for a put: it takes its own."""


class PutOperation(Operation):
    """Moves the blocks of one put into the store.

    Args:
        tiers: The store's tiers.
        requests: The call's part for each group.
        after: See Operation.
        arrived: Slots that were taken for a single request, and hold its images. If a
            slot gets a key, ``NO_SLOT`` replaces it; the others still belong to the
            caller.
    """

    verb = "put"
    side = PlanSide.PRODUCER

    def __init__(
        self,
        tiers: TierStack,
        requests: Sequence[BlockRequest],
        after: object = None,
        *,
        arrived: Ids = NO_SLOTS,
    ) -> None:
        super().__init__(tiers, requests, after)
        self._arrived = arrived
        # Blocks that were stored before.
        self._present = 0

    def count(self, counters: StoreCounters, nbytes: int, landed: int) -> None:
        counters.put_ended(
            nbytes, there=landed, blocks=self.blocks, present=self._present
        )

    async def step(self, request: BlockRequest, positions: Ids) -> Bits:
        """Copy missing blocks into memory, then write them to lower tiers.

        Cancel safety: a running copy or write is finished first.
        """
        memory = self.tiers.memory
        nbytes = request.namespace.image_bytes
        keys = request.keys[positions]
        if self.tiers.through:
            ask = positions.size * nbytes > STORE_UNASKED_BYTES
            done = await self.tiers.kept(keys, ask=ask)
            slots = memory.index.find(keys)
        else:
            slots = memory.index.find(keys)
            done = slots >= 0
        if any_of(done):
            count = int(np.add.reduce(done))
            self._present += count
            self.settled(count)
            return done
        named = request.namespace.tenant
        tenant = self.tiers.tenants.number(named) if named else 0
        if why := memory.too_large(nbytes, tenant):
            memory.log_once(why)
            self.lost(request, positions, why)
            self.settled(positions.size)
            return ~done
        lacking = slots < 0
        if request.repeats:
            lacking &= once(keys)
        ends = memory.in_flight.ends
        if ends and await memory.in_flight.one_ended(keys[lacking]):
            return done
        count = int(np.add.reduce(lacking))
        slots = NO_SLOTS
        begun = memory.in_flight.begun
        if count and not self._arrived.size:
            slots = await memory.take(nbytes, count, tenant)
        fresh = count == keys.size and memory.in_flight.begun == begun
        held, slots = await self._fill(request, positions, slots, fresh=fresh)
        try:
            if self.tiers.through and slots.size:
                await self._write_through(request, positions[held], slots)
        finally:
            memory.unpin(slots)
        if slots.size == request.keys.size:
            self._released.add(request)
        return held

    async def _fill(
        self, request: BlockRequest, positions: Ids, taken: Ids, *, fresh: bool
    ) -> tuple[Bits, Ids]:
        """Copy missing blocks into the taken slots.

        Taking slots may have waited, so memory is looked up again, unless it is
        ``fresh``: then none of these blocks has arrived or is arriving.

        Returns:
            Which blocks are in memory now, and their slots, which are pinned.
        """
        memory = self.tiers.memory
        keys = request.keys[positions]
        if fresh:
            held = np.zeros(keys.size, np.bool_)
            slots = np.zeros(keys.size, np.int64)
            free = ~held
        else:
            slots = memory.index.find(keys)
            held = slots >= 0
            free = ~held & ~memory.in_flight.busy(keys)
        if request.repeats:
            free &= once(keys)
        lacking = free.nonzero()[0]
        copying = not self._arrived.size
        if copying:
            # If there is not room for all, the head of the chain comes last and stays.
            mine = lacking[max(0, lacking.size - taken.size) :]
            if mine.size < taken.size:
                memory.give_back(taken[mine.size :])
                taken = taken[: mine.size]
        else:
            mine = lacking
            taken = self._arrived[positions[lacking]]
            self._arrived[positions[lacking]] = NO_SLOT
        if any_of(held):
            memory.index.pin(slots[held])
        memory.in_flight.begin(keys[mine])
        try:
            if mine.size:
                if copying:
                    images = memory.images(taken, request.namespace.image_bytes)
                    await self.copy(request, positions[mine], images, request.order)
                self.tiers.namespaces[request.namespace.digest] = request.namespace
                memory.index.name(keys[mine], taken, None, request.order)
        except BaseException:
            memory.give_back(taken)
            memory.unpin(slots[held])
            raise
        finally:
            memory.in_flight.end(keys[mine])
        held[mine] = True
        slots[mine] = taken
        self.settled(int(np.add.reduce(held)))
        memory.counts.written_blocks += mine.size
        return held, slots[held]

    async def _write_through(
        self, request: BlockRequest, positions: Ids, slots: Ids
    ) -> None:
        memory = self.tiers.memory
        keys = request.keys[positions]
        first = once(keys) if request.repeats else slice(None)
        images = memory.images(slots[first], request.namespace.image_bytes)
        orders = memory.index.orders(slots[first])
        born = memory.index.born(slots[first])
        batch = Batch(keys[first], orders, images, born=born)
        failed = await self.tiers.write_through(request.namespace, batch) != LANDED
        memory.below[slots[first]] = ~failed
        memory.untaken[slots[first]] = failed
        memory.passed(batch.keys[~failed], slots[first][~failed])
        if any_of(failed):
            names = set(batch.keys[failed].tolist())
            lost = np.fromiter(map(names.__contains__, keys.tolist()), np.bool_)
            error = self.tiers.reason or UNSAID
            self.lost(request, positions[lost], f"it is in memory only: {error}")
