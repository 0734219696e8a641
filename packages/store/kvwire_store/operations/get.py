"""A get: from a lower tier into memory if needed, then from memory into a cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import monotonic
from typing import ClassVar, Final

import numpy as np

from kvwire.kv.blocks import Bits, Ids, all_of, any_of
from kvwire.kv.fragments import Fragments
from kvwire.kv.plan import PlanSide
from kvwire.memory.copy import copy
from kvwire_store.counters import StoreCounters
from kvwire_store.host_blocks import HostBlocks
from kvwire_store.images import images_in
from kvwire_store.keys import Keys, as_keys, once
from kvwire_store.namespace import ABSENT, DIGEST_BYTES, UNKNOWN, Namespace
from kvwire_store.operations.base import Operation
from kvwire_store.operations.group_request import BlockRequest
from kvwire_store.placement import BlockState
from kvwire_store.tier_stack import NOT_THERE, TierStack
from kvwire_store.tiers.base import (
    LANDED,
    MISSING,
    Batch,
    BlockResult,
    BlockResults,
    Tier,
    TierAnswer,
    all_landed,
)

_ALL: Final = slice(None)

_STATES: Final = {
    BlockResult.MISSING: BlockState.MISSING,
    BlockResult.DAMAGED: BlockState.MISSING,
}
# How many other namespaces are searched to explain why nothing was found.
_NAMESPACES_TRIED: Final = 16
_NO_KEYS: Final = as_keys(())


class GetOperation(Operation):
    """Moves the blocks of one get out of the store."""

    verb = "get"
    side = PlanSide.CONSUMER
    into_memory: ClassVar[bool] = False
    """Whether the blocks have to be in memory at the end."""

    def __init__(
        self,
        tiers: TierStack,
        requests: Sequence[BlockRequest],
        after: object = None,
    ) -> None:
        super().__init__(tiers, requests, after)
        # Tiers that evicted a block while it was being read in place.
        self._changed: set[Tier] = set()

    def count(self, counters: StoreCounters, nbytes: int, landed: int) -> None:
        counters.get_ended(nbytes, there=landed, blocks=self.blocks)

    def turns(self, request: BlockRequest) -> Iterable[Ids]:
        """Process blocks in memory first, before they are evicted."""
        here = self.tiers.memory.index.find(request.keys) >= 0
        return here.nonzero()[0], (~here).nonzero()[0]

    def at_once(self) -> bool:
        """Copy all blocks in this turn, if all are in memory on this host.

        Returns:
            Whether all have landed. If not, the call continues as if this had not been
            tried; only the bytes in the caller's blocks may have changed.
        """
        memory = self.tiers.memory
        in_place: list[tuple[Tier, int, int]] = []
        here = 0
        self._first = monotonic()
        for request in self._requests:
            nbytes = request.namespace.image_bytes
            slots = memory.index.find(request.keys)
            in_memory = slots >= 0
            if np.logical_and.reduce(in_memory):
                orders = memory.index.orders(slots)
                self.copy_now(request, memory.images(slots, nbytes), orders)
                here += slots.size
                continue
            tier = self.tiers.mapped
            if tier is None or tier.mapped is None:
                return False
            found = tier.mapped.find(request.keys, nbytes)
            if not all_of(found.slots >= 0):
                return False
            images = tier.mapped.images(found.slots, nbytes)
            self.copy_now(request, images, found.orders)
            if not all_of(tier.mapped.index.same(found)):
                return False
            in_place.append((tier, slots.size, images.nbytes))
            if not any_of(in_memory):
                self.elsewhere.add(request)
        self._last = monotonic()
        memory.counts.read_blocks += here
        for tier, blocks, nbytes in in_place:
            tier.read_in_place(blocks, nbytes)
        self.drained.set()
        return True

    @property
    def is_near(self) -> bool:
        """Whether :meth:`at_once` may find all blocks in memory on this host."""
        if self.tiers.mapped is not None:
            return True
        find = self.tiers.memory.index.find
        return all(bool(all_of(find(one.keys) >= 0)) for one in self._requests)

    def took(self, request: BlockRequest, tier: Tier, answer: TierAnswer) -> None:
        """Copy the blocks of a tier's answer into the caller's, and note the others."""
        self._first = monotonic()
        results = np.frombuffer(answer.results, np.uint8)
        positions = np.arange(results.size)
        if answer.landed is not None:
            # No lookup found it, so it was not evicted: it just does not exist.
            noted = (results != LANDED) & (results != MISSING)
            self._note(request, positions[noted], results[noted], tier)
            positions = answer.landed.nonzero()[0]
            self._rest[request] = (~answer.landed).nonzero()[0]
            self._next[request] = (~answer.landed).astype(np.int64)
        if positions.size:
            line = np.frombuffer(answer.images, np.uint8)
            namespace = request.namespace
            images = images_in(line, namespace.image_bytes, positions.size)
            orders = np.frombuffer(answer.orders, np.uint8)[positions]
            for ends in self._ends(request, positions, images, orders):
                copy(*ends)
            self.tiers.namespaces[namespace.digest] = namespace
            self.elsewhere.add(request)
            self.settled(positions.size)
        self._last = monotonic()

    async def step(self, request: BlockRequest, positions: Ids) -> Bits:
        """Copy blocks in memory at once; read others from the first tier with any.

        Cancel safety: a running copy or read is finished first.
        """
        memory = self.tiers.memory
        keys = request.keys[positions]
        begun = memory.in_flight.begun
        slots = memory.index.find(keys)
        here = slots >= 0
        # 1. Blocks in memory are handed out at once. They are found and pinned in the
        # same turn of the loop, so no eviction can come between.
        if any_of(here):
            memory.index.pin(slots[here])
            await self._hand_out(request, positions[here], slots[here], None)
            return here
        tier = None if self.into_memory else self.tiers.mapped
        if tier is not None and tier.mapped is not None and tier not in self._changed:
            here = await self._read_in_place(request, positions, tier, tier.mapped)
            if any_of(here):
                return here
        # 2. From here on, none of the blocks is in memory. If another call is loading
        # one of them, this call waits for it and settles nothing: the caller steps
        # again.
        if memory.in_flight.ends and await memory.in_flight.one_ended(keys):
            return here
        # 3. No other call is loading them. Each block has a tier to try next. The
        # blocks with the nearest tier are read now; a hash that is listed twice is read
        # once.
        tried = self._next.get(request)
        first = 0
        which: Ids | slice = _ALL
        if tried is not None:
            first = int(np.minimum.reduce(tried[positions]))
            which = (tried[positions] == first).nonzero()[0]
        if request.repeats:
            places = np.arange(keys.size)[which]
            which = places[once(keys[places])]
        asked = positions[which]
        # 4. Memory may have changed during this await; `_read` detects that by `begun`.
        number, orders = await self.tiers.source(keys[which], first)
        if number == len(self.tiers.below):
            fresh = asked[self._codes[request][asked] == 0]
            self.lost(request, fresh, NOT_THERE, BlockState.MISSING)
            self.settled(asked.size)
            here[which] = True
            return here
        found = orders != ABSENT
        tier = self.tiers.below[number]
        there = asked[found]
        orders = orders[found]
        landed, lost = await self._read(request, there, orders, tier, begun)
        # 5. Blocks that landed are settled. Blocks that this tier lacked or did not
        # deliver are tried at the next tier by a later step; all others are unchanged.
        if landed.size == positions.size:
            return ~here  # all
        if tried is None:
            tried = self._next[request] = np.zeros(request.keys.size, np.int64)
        tried[asked[~found]] = tried[lost] = number + 1
        ended = np.zeros(request.keys.size, np.bool_)
        ended[landed] = True
        return ended[positions]

    async def explain(self) -> None:
        """Add to the reasons for missing blocks whether another namespace has them.

        Cancel safety: safe, it only reads.
        """
        for request in self._requests:
            positions = self.lacking(request, NOT_THERE)
            if not positions.size:
                continue
            away = [t for t in self.tiers.below if t.reason]
            if away:
                why = "; ".join(f"{t.name}: {t.reason}" for t in away)
                self.lost(request, positions, f"{NOT_THERE}; not searched: {why}")
            others = [
                s
                for s in self.tiers.namespaces.values()
                if s != request.namespace and s.tenant == request.namespace.tenant
            ][:_NAMESPACES_TRIED]
            # In one call, since a tier may need a round trip.
            keys = [_moved(request.keys[positions], other) for other in others]
            found = await self.tiers.find(np.concatenate((*keys, _NO_KEYS)))
            table = found.reshape(-1, positions.size)
            for other, there in zip(others, table, strict=True):
                fields = ", ".join(request.namespace.differing(other))
                why = f"{NOT_THERE} for this cache; it is for one with another {fields}"
                if any_of(there):
                    self.lost(request, positions[there], why, BlockState.MISSING)

    def absent(self, request: BlockRequest) -> Bits:
        """Return the blocks of a request that no tier has."""
        known = [text.startswith(NOT_THERE) for text in self._reasons]
        return np.array(known)[self._codes[request]]

    # --- inside -----------------------------------------------------------------------

    async def _read_in_place(
        self,
        request: BlockRequest,
        positions: Ids,
        tier: Tier,
        mapped: HostBlocks,
    ) -> Bits:
        """Copy blocks from the memory of a server on this host into the cache.

        Returns:
            Which blocks have landed. If one was evicted meanwhile, all others are
            requested from the server.
        """
        nbytes = request.namespace.image_bytes
        found = mapped.find(request.keys[positions], nbytes)
        landed = found.slots >= 0
        if not any_of(landed):
            return landed
        found = found.selected(landed)
        images = mapped.images(found.slots, nbytes)
        await self.copy(request, positions[landed], images, found.orders)
        same = mapped.index.same(found)
        if not all_of(same):
            self._changed.add(tier)
        landed[landed] = same
        count = int(np.add.reduce(same))
        self._codes[request][positions[landed]] = 0
        tier.read_in_place(count, count * nbytes)
        self.settled(count)
        return landed

    async def _read(
        self,
        request: BlockRequest,
        positions: Ids,
        orders: BlockResults,
        tier: Tier,
        begun: int,
    ) -> tuple[Ids, Ids]:
        """Read blocks into memory and copy them to the cache.

        Args:
            request: The request with the blocks.
            positions: The blocks' positions in it.
            orders: The order of each image, or ``UNKNOWN``.
            tier: The tier that has them.
            begun: The number of fills of memory begun when it had none of the blocks.

        Returns:
            The positions that landed, and the positions that this tier did not deliver.
        """
        memory = self.tiers.memory
        nbytes = request.namespace.image_bytes
        named = request.namespace.tenant
        tenant = self.tiers.tenants.number(named) if named else 0
        if why := memory.too_large(nbytes, tenant):
            self.lost(request, positions, why, BlockState.REFUSED)
            return positions[:0], positions
        taken = await memory.take(nbytes, positions.size, tenant)
        keys = request.keys[positions]
        # Taking slots may have waited for an eviction. If a fill has begun meanwhile,
        # only blocks that memory still lacks are read, so no key is filled twice. From
        # `begin` to `end` other calls wait for these blocks.
        if memory.in_flight.begun != begun or taken.size < keys.size:
            mine, taken = self._lacking_still(keys, taken)
            keys = keys[mine]
            orders = orders[mine]
            positions = positions[mine]
        landed = np.zeros(keys.size, np.bool_)
        whole = not keys.size
        images = None
        memory.in_flight.begin(keys)
        try:
            if keys.size:
                known = orders.tobytes()
                born = (
                    np.full(keys.size, memory.index.now())
                    if memory.index.shares.expire
                    else None
                )
                images = memory.images(taken, nbytes)
                kept = np.empty(keys.size, np.bool_)
                kept.fill(True)
                batch = Batch(keys, orders, images, born=born, kept=kept)
                results = await tier.read(request.namespace, batch)
                whole = all_landed(results)
                if not whole:
                    landed = results == LANDED
                    found = np.frombuffer(known, np.uint8) != UNKNOWN
                    # No lookup found it, so it was not evicted: it just does not exist.
                    noted = found | (results != MISSING)
                    self._note(request, positions[noted], results[noted], tier)
                if whole or any_of(landed):
                    namespace = request.namespace
                    self.tiers.namespaces[namespace.digest] = namespace
                # Mostly all of them; a slice takes a fraction of a mask's time.
                here = _ALL if whole else landed
                memory.below[taken[here]] = kept[here]
                since = None if born is None else born[here]
                memory.index.name(keys[here], taken[here], since, orders[here])
        finally:
            memory.in_flight.end(keys)
            if not whole:
                memory.give_back(taken[~landed])
        if whole:
            if keys.size:
                await self._hand_out(request, positions, taken, images)
                self._passed(keys, taken)
            return positions, positions[:0]
        if any_of(landed):
            await self._hand_out(request, positions[landed], taken[landed], images)
            self._passed(keys[landed], taken[landed])
        return positions[landed], positions[~landed]

    def _passed(self, keys: Keys, slots: Ids) -> None:
        if not self.into_memory:
            self.tiers.memory.passed(keys, slots)

    def _lacking_still(self, keys: Keys, taken: Ids) -> tuple[Ids, Ids]:
        """Return the blocks that are still not in memory.

        Returns:
            The positions of these blocks, and as many slots; other slots are given
            back.
        """
        memory = self.tiers.memory
        free = (memory.index.find(keys) < 0) & ~memory.in_flight.busy(keys)
        mine = free.nonzero()[0][-taken.size :]
        memory.give_back(taken[mine.size :])
        return mine, taken[: mine.size]

    async def _hand_out(
        self,
        request: BlockRequest,
        positions: Ids,
        slots: Ids,
        images: Fragments | None,
    ) -> None:
        """Copy pinned slots into the cache, and unpin them."""
        memory = self.tiers.memory
        if images is None or len(images) != slots.size:
            images = memory.images(slots, request.namespace.image_bytes)
        try:
            orders = memory.index.orders(slots)
            await self.copy(request, positions, images, orders)
        finally:
            memory.unpin(slots)
        if positions.size == request.keys.size:
            self._released.add(request)
        self._codes[request][positions] = 0
        memory.counts.read_blocks += positions.size
        self.settled(positions.size)

    def _note(
        self, request: BlockRequest, positions: Ids, results: BlockResults, tier: Tier
    ) -> None:
        """Record why a tier did not give some blocks, in case no other tier does."""
        reasons = {
            BlockResult.MISSING: f"it was evicted from {tier.name} before it was read",
            BlockResult.DAMAGED: f"its bytes in {tier.name} are damaged",
            BlockResult.FAILED: f"{tier.name} could not read it: {tier.error}",
            BlockResult.REFUSED: f"{tier.name} did not deliver it: {tier.error}",
        }
        for result, reason in reasons.items():
            if any_of(results == result):
                state = _STATES.get(result, BlockState.DEFERRED)
                self.lost(request, positions[results == result], reason, state)


def _moved(keys: Keys, namespace: Namespace) -> Keys:
    """Return the keys of the same hashes in another namespace."""
    return as_keys(namespace.digest + key[DIGEST_BYTES:] for key in keys.tolist())
