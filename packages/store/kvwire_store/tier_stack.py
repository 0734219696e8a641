"""All tiers of a store: memory, and the tiers below it."""

from __future__ import annotations

import itertools
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Final

import numpy as np

from kvwire.aio import gather_all
from kvwire.errors import UsageError, shown
from kvwire.kv.blocks import Bits, Ids, all_of, any_of
from kvwire_store.counters import StoreCounters
from kvwire_store.index import Index
from kvwire_store.keys import IndexedSlots, Keys, Orders
from kvwire_store.namespace import ABSENT, DIGEST_BYTES, UNKNOWN, Namespace
from kvwire_store.placement import BlockState, Placement, Placing, Verb
from kvwire_store.tenants import Tenants
from kvwire_store.threads import Threads
from kvwire_store.tiers.base import LANDED, REFUSED, Batch, BlockResults, Tier
from kvwire_store.tiers.memory import MemoryTier

_digest = itemgetter(slice(DIGEST_BYTES))
# How often a delete is repeated while others keep putting the same blocks.
_ROUNDS: Final = 8
NOT_THERE: Final = "it is not in the store"
UNSAID: Final = "a lower tier did not store it, but works again by now"
"""The reason if a tier refused some blocks, but has stored later ones."""


class TierStack:
    """Finds the tier of a block, and moves blocks between tiers."""

    def __init__(
        self,
        index: Index,
        below: Sequence[Tier],
        *,
        through: bool,
        threads: Threads,
        tenants: Tenants | None = None,
        name: str = "memory",
    ) -> None:
        self.name = name
        self.tenants: Tenants = Tenants() if tenants is None else tenants
        self.by_tenant: tuple[StoreCounters, ...] = tuple(
            StoreCounters() for _ in self.tenants.listed
        )
        self.counters: StoreCounters = StoreCounters()
        # The bytes that prefetches are moving, by the tenant's number.
        self.moving_bytes: Ids = np.zeros(len(self.tenants) + 1, np.int64)
        self.below: tuple[Tier, ...] = tuple(below)
        self.through: bool = through and bool(below)
        self.memory: MemoryTier = MemoryTier(
            index, self if below else None, ahead=not through
        )
        self.threads = threads
        known = itertools.chain.from_iterable(tier.namespaces() for tier in below)
        self.namespaces: dict[bytes, Namespace] = {one.digest: one for one in known}

    @property
    def mapped(self) -> Tier | None:
        """The first lower tier that supports reads in place, or None."""
        for tier in self.below:
            if tier.mapped is not None:
                return tier
        return None

    async def find(self, keys: Keys) -> Bits:
        """Return the blocks that are in any tier.

        Cancel safety: safe, it only reads.
        """
        here: Bits = await self.orders(keys) != ABSENT
        return here

    async def orders(self, keys: Keys) -> Orders:
        """Return each image's order in the first tier that has it, or ``ABSENT``.

        Cancel safety: safe, it only reads.
        """
        orders = self.memory.orders(keys)
        for tier in self.below:
            lacking = orders == ABSENT
            count = int(np.add.reduce(lacking))
            if not count:
                break
            if count == keys.size:
                orders[:] = await tier.find(keys)
            else:
                orders[lacking] = await tier.find(keys[lacking])
        return orders

    def touch(self, keys: Keys, *, released: bool = False, here: bool = True) -> None:
        """Mark a chain's blocks as used in all tiers, its head last.

        If they were just ``released`` together, memory has their order already. Without
        ``here``, memory has none of them.
        """
        if here and not released:
            index = self.memory.index
            slots = index.find(keys)
            known = slots >= 0
            if any_of(known):
                index.touch(slots[known])
        for tier in self.below:
            tier.touch(keys)

    def read_in_place(self, blocks: int, nbytes: int) -> None:
        """Count blocks that other processes have read in place."""
        self.memory.counts.read_blocks += blocks
        self.counters.hit_blocks += blocks
        self.counters.got_bytes += nbytes

    def got(self, keys: Keys, namespace: Namespace, slots: Ids | None = None) -> None:
        """Count a get that was served from memory without an operation.

        Blocks that are still in ``slots`` are also marked as used.
        """
        if slots is not None:
            self.memory.index.touch(slots)
            for tier in self.below:
                tier.touch(keys)
        self.memory.counts.read_blocks += keys.size
        nbytes = keys.size * namespace.image_bytes
        count = int(keys.size)
        for counters in self.counters_of(namespace):
            counters.get_ended(nbytes, there=count, blocks=count)

    def counters_of(self, namespace: Namespace) -> tuple[StoreCounters, ...]:
        """Return the counters for a call in some namespace."""
        if len(self.by_tenant) == 1:
            return (self.counters,)
        number = self.tenants.number(namespace.tenant)
        return self.counters, self.by_tenant[number]

    async def source(self, keys: Keys, first: int) -> tuple[int, Orders]:
        """Return the first tier from ``first`` on with any of the blocks, and orders.

        The number is past the last tier if no tier has any. If a tier's lookup
        takes as long as a read, the tier is assumed to have the blocks: usually a match
        has just found them.

        Cancel safety: safe, it only reads.
        """
        for number in range(first, len(self.below)):
            if self.below[number].asks:
                unknown = np.empty(keys.size, np.uint8)
                unknown.fill(UNKNOWN)
                return number, unknown
            orders = await self.below[number].find(keys)
            if any_of(orders != ABSENT):
                return number, orders
        return len(self.below), np.full(keys.size, ABSENT, np.uint8)

    async def kept(self, keys: Keys, *, ask: bool = True, touch: bool = True) -> Bits:
        """Return which blocks are already in the tiers that a put must reach.

        By default these blocks are marked as used.

        Cancel safety: safe, it may be called again.
        """
        kept = np.zeros(keys.size, np.bool_)
        if not self.through:
            return kept
        for tier in self.below if len(self.below) == 1 else self.keepers:
            if tier.asks and not ask:
                continue
            found = await tier.holds(keys)
            if any_of(found):
                if touch:
                    tier.touch(keys[found])
                kept |= found
        return kept

    def known_kept(self, keys: Keys, slots: Ids) -> Bits:
        """Return which blocks :meth:`kept` would count, without asking a tier.

        Tiers with an index here may have evicted blocks since they took them. If there
        is none, the other tiers' last answer counts, for blocks in a slot of memory.
        """
        held = [tier.indexed(keys) for tier in self.keepers]
        known = [bits for bits in held if bits is not None]
        if known:
            return known[0] if len(known) == 1 else np.logical_or.reduce(known)
        kept: Bits = (slots >= 0) & self.memory.below[slots]
        return kept

    @property
    def keepers(self) -> tuple[Tier, ...]:
        """The tiers one of which must have a block for a put to be complete."""
        if len(self.below) == 1:
            return self.below
        return tuple(t for t in self.below if t.durable) or self.below

    @property
    def reason(self) -> str:
        """Why the tiers in :attr:`keepers` accept no blocks."""
        return "; ".join(f"{t.name}: {t.error}" for t in self.keepers if t.error)

    def write_through(
        self, namespace: Namespace, batch: Batch
    ) -> Coroutine[Any, Any, BlockResults]:
        """Write images to every lower tier that lacks them.

        Returns:
            The result of each block in the best of the tiers in :attr:`keepers`.

        Cancel safety: the writes are finished first.
        """
        tier = self.below[0]
        if len(self.below) > 1:
            return self._write_all(namespace, batch)
        # If a tier's ``find`` needs a round trip, the tier was asked when the put
        # began, or the question is not worth it.
        if tier.asks and tier.taking:
            return tier.write(namespace, batch)
        return self._write(tier, namespace, batch)

    async def _write_all(self, namespace: Namespace, batch: Batch) -> BlockResults:
        writes = (self._write(tier, namespace, batch) for tier in self.below)
        done = dict(zip(self.below, await gather_all(*writes), strict=True))
        best: BlockResults = np.minimum.reduce([done[tier] for tier in self.keepers])
        return best

    async def _write(
        self, tier: Tier, namespace: Namespace, batch: Batch
    ) -> BlockResults:
        """Write images to one tier, except for present ones."""
        results = np.empty(batch.keys.size, np.uint8)
        results.fill(REFUSED)
        if tier.asks:
            return await tier.write(namespace, batch) if tier.taking else results
        held = await tier.holds(batch.keys)
        if not any_of(held):
            return await tier.write(namespace, batch) if tier.taking else results
        tier.touch(batch.keys[held])
        results[held] = LANDED
        if tier.taking and not all_of(held):
            written = await tier.write(namespace, batch.selected(~held))
            results[~held] = written
        return results

    async def delete(self, keys: Keys) -> None:
        """Delete blocks from all tiers, once running reads and writes have ended.

        Cancel safety: safe, it may be called again.
        """
        for _ in range(_ROUNDS if self.below else 1):
            await self.memory.delete(keys)
            await gather_all(*(tier.delete(keys) for tier in self.below))
            # A concurrent get may have brought blocks back to memory, and from there
            # they may have been written to lower tiers again.
            if not self.memory.has_any(keys):
                return

    async def delete_namespace(self, digest: bytes) -> int:
        """Delete every block of a namespace from all tiers.

        Returns:
            The number of blocks in those tiers whose index is in this process.

        Cancel safety: safe, it may be called again.
        """
        known = set(self.memory.of_namespace(digest).tolist())
        for tier in self.below:
            known.update(tier.known(digest).tolist())
        for _ in range(_ROUNDS if self.below else 1):
            await self.memory.delete_namespace(digest)
            await gather_all(*(tier.delete_namespace(digest) for tier in self.below))
            if not self.memory.of_namespace(digest).size:
                break
        return len(known)

    async def apply(self, verb: Verb, namespace: Namespace, keys: Keys) -> Placement:
        """Pin or unpin blocks, in each tier that has them.

        Returns:
            The best result of each block in any tier.

        Cancel safety: safe, it may be called again.
        """
        placing = Placing(keys.size, BlockState.MISSING, NOT_THERE)
        every = np.arange(keys.size)
        placing.better(every, self.memory.index.apply(verb, keys), verb)
        for tier in self.below:
            placing.better(every, await tier.apply(verb, namespace, keys), verb)
        return placing.end()

    def named(self, place: str) -> Tier | None:
        """Return a tier by its address, or by the kind of its address.

        Args:
            place: The address, with or without its options; or a kind such as "disk" if
                there is only one tier of that kind. "" for memory.

        Returns:
            None for memory.

        Raises:
            UsageError: There is no such tier.
        """
        if place in ("", "memory", self.name):
            return None
        for alike in (_same_address, _same_kind):
            found = [tier for tier in self.below if alike(tier.name, place)]
            if len(found) == 1:
                return found[0]
        names = [self.name, *(tier.name for tier in self.below)]
        raise UsageError(f"tier={shown(place)}: the tiers are {', '.join(names)}")

    def of_tenant(self, tenant: str) -> list[Namespace]:
        """Return the known namespaces of a tenant.

        Raises:
            UsageError: There is no such tenant.
        """
        self.tenants.require(tenant)
        return [one for one in self.namespaces.values() if one.tenant == tenant]

    def by_namespace(self, keys: Keys) -> Iterator[tuple[Bits, Namespace]]:
        """Yield the known namespaces of some blocks, each with its blocks."""
        digests = list(map(_digest, keys.tolist()))
        for digest in set(digests):
            if digest in self.namespaces:
                # Not compared by NumPy, which ignores zeros at the end of bytes.
                mine = np.fromiter(map(digest.__eq__, digests), np.bool_, keys.size)
                yield mine, self.namespaces[digest]

    async def flush(self) -> None:
        """Wait until all stored blocks would survive a power cut, if a tier can do so.

        It first writes blocks that a tier refused when they were put.

        Raises:
            OSError: A tier failed; the text has the number of blocks that are in memory
                only.

        Cancel safety: safe, it may be called again.
        """
        left = await self.memory.write_down(every=not self.through)
        flushed = gather_all(*(tier.flush() for tier in self.below))
        if not left:
            await flushed
            return
        with suppress(OSError):  # the error reports this together with the blocks
            await flushed
        reasons = (f"{tier.name}: {tier.error or UNSAID}" for tier in self.keepers)
        blocks = "1 block is" if left == 1 else f"{left} blocks are"
        raise OSError(f"{blocks} in memory only: {'; '.join(reasons)}")

    async def demote(self, named: IndexedSlots) -> str:
        """Write blocks from memory to a tier that accepts them, unless one has them.

        Returns:
            Why some were not accepted, or "".

        Cancel safety: running writes are finished first.
        """
        # The caller has pinned the blocks: they keep their slots until this returns.
        index = self.memory.index
        # ``below`` marks blocks that a lower tier kept. A tier with an index here is
        # checked again: that costs nothing, and it may have evicted them since.
        lacking = ~self.memory.below[named.slots]
        tiers = self.keepers if self.through else self.below
        for tier in tiers:
            if not tier.asks:
                lacking[:] = True
                break
        if index.shares.expire:
            # After a restart, a disk counts a block's age from zero.
            lacking &= ~index.late(named.slots)
        for tier in tiers:
            if any_of(lacking):
                lacking[lacking] = ~await tier.holds(named.keys[lacking])
        # Until a tier has stored these blocks, they are in memory only.
        self.memory.untaken[named.slots] = lacking
        if not any_of(lacking):
            return ""
        takers = [tier for tier in tiers if tier.taking]
        if not takers:
            return "; ".join(f"{tier.name}: {tier.error}" for tier in tiers)
        all_taken = True
        keys = named.keys[lacking]
        slots = named.slots[lacking]
        for mine, namespace in self.by_namespace(keys):
            orders = self.memory.index.orders(slots[mine])
            images = self.memory.images(slots[mine], namespace.image_bytes)
            born = self.memory.index.born(slots[mine])
            batch = Batch(keys[mine], orders, images, born=born)
            taken = await _taken(takers, namespace, batch)
            self.memory.untaken[slots[mine]] = ~taken
            all_taken &= all_of(taken)
        reasons = (f"{tier.name}: {tier.error or UNSAID}" for tier in takers)
        return "" if all_taken else "; ".join(reasons)


def _same_address(name: str, place: str) -> bool:
    return place in (name, name.partition("?")[0])


def _same_kind(name: str, place: str) -> bool:
    return name.partition(":")[0] == place


async def _taken(takers: Iterable[Tier], namespace: Namespace, batch: Batch) -> Bits:
    """Write blocks to one tier, and its refused blocks to the next."""
    taken = np.zeros(batch.keys.size, np.bool_)
    for tier in takers:
        left = np.flatnonzero(~taken)
        taken[left] = await tier.write(namespace, batch.selected(left)) == LANDED
        if all_of(taken):
            break
    return taken
