"""Executes verbs, which pin blocks or copy them to a faster tier.

Blocks go through slots of memory, by the same rules as in gets and puts. A prefetch is
a get without a cache: it waits for running fills, so no block is filled twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from kvwire.kv.blocks import Ids, all_of
from kvwire.kv.fragments import Fragments
from kvwire_store.counters import StoreCounters
from kvwire_store.keys import Keys, Orders, once
from kvwire_store.limits import STORE_BATCH_BYTES
from kvwire_store.namespace import Namespace
from kvwire_store.operations.get import GetOperation
from kvwire_store.operations.group_request import (
    BlockRequest,
    NamedRequest,
    keys_of,
)
from kvwire_store.placement import (
    BlockState,
    Placement,
    Placing,
    Verb,
    VerbKind,
    all_placed,
    of_shards,
)
from kvwire_store.tier_stack import NOT_THERE, TierStack
from kvwire_store.tiers.base import LANDED, Batch, Tier
from kvwire_store.tiers.slabs import rounded

_AGAIN: Final = "it was evicted again: memory has no room for it"


class PrefetchOperation(GetOperation):
    """Reads blocks into memory only."""

    verb = "prefetch"
    into_memory = True

    def count(self, counters: StoreCounters, nbytes: int, landed: int) -> None:
        """Count nothing: neither a hit nor a miss."""

    async def copy(
        self,
        request: BlockRequest,
        positions: Ids,
        images: Fragments,
        orders: Orders | int,
    ) -> None:
        """Copy nothing: the blocks stay in memory.

        Cancel safety: safe, nothing is awaited.
        """


async def carry_out(
    tiers: TierStack,
    verb: Verb,
    namespaces: Sequence[Namespace],
    hashes: Sequence[bytes],
) -> Placement:
    """Execute a verb on the blocks of some hashes.

    Args:
        tiers: The store's tiers.
        verb: What to do.
        namespaces: The blocks' namespaces. If there are several, they are shards of one
            model, and the worst result counts.
        hashes: The hashes, which may be listed twice.

    Raises:
        UsageError: There is no such tier, or the hashes are invalid.

    Cancel safety: a running read or write is finished first; no block is lost.
    """
    parts = []
    for namespace in namespaces:
        keys = keys_of(hashes, namespace)
        first = once(keys)
        if all_of(first):
            parts.append(await _carry_out(tiers, verb, namespace, keys))
            continue
        named = keys[first]
        part = await _carry_out(tiers, verb, namespace, named)
        places = dict(zip(named.tolist(), range(named.size), strict=True))
        which = np.fromiter(map(places.__getitem__, keys.tolist()), np.int64, keys.size)
        parts.append(part.selected(which))
    if not parts:
        why = f"{NOT_THERE}, which knows no kind of cache yet: pass one"
        return all_placed(len(hashes), BlockState.MISSING, why)
    return parts[0] if len(parts) == 1 else of_shards(parts)


async def _carry_out(
    tiers: TierStack, verb: Verb, namespace: Namespace, keys: Keys
) -> Placement:
    """Execute a verb on blocks of one namespace, each listed once."""
    if verb.kind is not VerbKind.PREFETCH:
        return await tiers.apply(verb, namespace, keys)
    prefetch = _Prefetch(tiers, verb, namespace)
    placing = Placing(keys.size)
    with _allowed(tiers, namespace, keys.size) as (now, most):
        step = max(1, STORE_BATCH_BYTES // namespace.image_bytes)
        for first in range(0, now, step):
            some = slice(first, min(first + step, now))
            placing.place(some, await prefetch.copy(keys[some]))
    bound = "its tenant may prefetch at once"
    placing.rule(
        slice(now, most),
        BlockState.DEFERRED,
        f"as much as {bound} is under way; call again",
    )
    placing.rule(
        slice(most, None),
        BlockState.CLIPPED,
        f"{most} blocks are the most that {bound}",
    )
    return placing.end()


@contextmanager
def _allowed(
    tiers: TierStack, namespace: Namespace, count: int
) -> Iterator[tuple[int, int]]:
    """Reserve memory for blocks to be prefetched.

    Yields how many may be copied now, and how many if no other prefetch were running.
    """
    tenant = tiers.tenants.number(namespace.tenant)
    most_bytes = tiers.tenants.moving_bytes(tenant, tiers.memory.counts.size_bytes)
    nbytes = rounded(namespace.image_bytes)
    most = min(count, most_bytes // nbytes)
    left_bytes = most_bytes - tiers.moving_bytes[tenant]
    now = min(most, max(0, left_bytes // nbytes))
    tiers.moving_bytes[tenant] += now * nbytes
    try:
        yield now, most
    finally:
        tiers.moving_bytes[tenant] -= now * nbytes


class _Prefetch:
    """Copies blocks of one namespace into a tier, a batch at a time."""

    def __init__(self, tiers: TierStack, verb: Verb, namespace: Namespace) -> None:
        self._tiers = tiers
        self._memory = tiers.memory
        self._namespace = namespace
        self._verb = verb
        self._target = tiers.named(verb.place)

    async def copy(self, keys: Keys) -> Placement:
        """Copy some blocks.

        Cancel safety: a running read or write is finished first.
        """
        target = self._target
        if target is None:
            return await self._to_memory(keys)
        told = await target.apply(self._verb, self._namespace, keys)
        placing = Placing(keys.size)
        placing.place(_ALL, told)
        lacking = told.missing.nonzero()[0]
        if lacking.size:
            placing.place(lacking, await self._to_tier(target, keys[lacking]))
        return placing.end()

    async def _to_memory(self, keys: Keys) -> Placement:
        """Read blocks into memory from the tiers below it."""
        request = NamedRequest(self._namespace, keys)
        work = PrefetchOperation(self._tiers, (request,))
        await work.run()
        placing = Placing(keys.size)
        placing.place(_ALL, work.placement(request))
        here = self._memory.index.find(keys) >= 0
        gone = (placing.states == BlockState.DONE) & ~here
        placing.rule(gone, BlockState.DEFERRED, _AGAIN)
        placing.rule(here, BlockState.DONE)
        return placing.end()

    async def _to_tier(self, target: Tier, keys: Keys) -> Placement:
        """Write a tier's missing blocks to it, through memory."""
        placing = Placing(keys.size)
        held = await target.holds(keys)
        placing.rule(held, BlockState.DONE)
        lacking = (~held).nonzero()[0]
        if not lacking.size:
            return placing.end()
        placing.place(lacking, await self._to_memory(keys[lacking]))
        if not target.taking:
            here = lacking[placing.states[lacking] == BlockState.DONE]
            why = f"{target.name}: {target.error}"
            placing.rule(here, BlockState.DEFERRED, why)
            return placing.end()
        # From here to the pins there is no await.
        slots = self._memory.index.find(keys[lacking])
        here = lacking[slots >= 0]
        slots = slots[slots >= 0]
        if here.size:
            await self._write(target, keys, placing, here, slots)
        return placing.end()

    async def _write(
        self, target: Tier, keys: Keys, placing: Placing, here: Ids, slots: Ids
    ) -> None:
        """Write blocks from their slots, and record the results."""
        index = self._memory.index
        named = keys[here]
        nbytes = self._namespace.image_bytes
        index.pin(slots)
        try:
            batch = Batch(
                named,
                index.orders(slots),
                self._memory.images(slots, nbytes),
                born=index.born(slots),
            )
            landed = await target.write(self._namespace, batch) == LANDED
        finally:
            self._memory.unpin(slots)
        placing.rule(here[landed], BlockState.DONE)
        large = target.too_large(self._namespace)
        state = BlockState.REFUSED if large else BlockState.DEFERRED
        why = f"{target.name} did not take it: {large or target.error}"
        placing.rule(here[~landed], state, why)


_ALL: Final = slice(None)
