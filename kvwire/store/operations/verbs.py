"""Executes verbs, which locate, protect and move blocks between tiers.

Moved blocks go through slots of memory, by the same rules as in gets and puts. A
prefetch is a get without a cache: it waits for running fills, so no block is filled
twice. A block leaves a tier only once another tier has it: a demote or move first
writes it there, and then drops the copies above, except those that are in use or
pinned. So a cancellation, at any await, never loses a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Final

import numpy as np

from kvwire.kv.blocks import Bits, Ids, all_of, any_of
from kvwire.kv.fragments import Fragments
from kvwire.store.counters import StoreCounters
from kvwire.store.keys import Keys, Orders, once
from kvwire.store.limits import STORE_BATCH_BYTES
from kvwire.store.namespace import Namespace
from kvwire.store.operations.get import GetOperation
from kvwire.store.operations.group_request import (
    BlockRequest,
    NamedRequest,
    keys_of,
)
from kvwire.store.placement import (
    BlockState,
    Placement,
    Placing,
    Verb,
    VerbKind,
    all_placed,
    of_shards,
)
from kvwire.store.tier_stack import NOT_THERE, TierStack
from kvwire.store.tiers.base import LANDED, Batch, Tier
from kvwire.store.tiers.slabs import rounded

_MOVING: Final = (VerbKind.PREFETCH, VerbKind.DEMOTE, VerbKind.MOVE)
_AGAIN: Final = "it was evicted again: memory has no room for it"
_STAYS: Final = "it is in use or pinned, and stays here as well"


class PrefetchOperation(GetOperation):
    """Reads blocks into memory only."""

    verb = "prefetch"
    reads_in_place = False

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
    target: Tier | None = None,
) -> Placement:
    """Execute a verb on the blocks of some hashes.

    Args:
        tiers: The store's tiers.
        verb: What to do.
        namespaces: The blocks' namespaces. If there are several, they are shards of one
            model, and the worst result counts.
        hashes: The hashes, which may be listed twice.
        target: The destination of a move; None if one of the store's tiers knows it.

    Raises:
        UsageError: There is no such tier or node, or the hashes are invalid.

    Cancel safety: a running read or write is finished first; no block is lost.
    """
    parts = []
    for namespace in namespaces:
        keys = keys_of(hashes, namespace)
        first = once(keys)
        if all_of(first):
            parts.append(await _carry_out(tiers, verb, namespace, keys, target))
            continue
        named = keys[first]
        part = await _carry_out(tiers, verb, namespace, named, target)
        places = dict(zip(named.tolist(), range(named.size), strict=True))
        which = np.fromiter(map(places.__getitem__, keys.tolist()), np.int64, keys.size)
        parts.append(part.selected(which))
    if not parts:
        why = f"{NOT_THERE}, which knows no kind of cache yet: pass one"
        return all_placed(len(hashes), BlockState.MISSING, why)
    return parts[0] if len(parts) == 1 else of_shards(parts)


async def _carry_out(
    tiers: TierStack,
    verb: Verb,
    namespace: Namespace,
    keys: Keys,
    target: Tier | None,
) -> Placement:
    """Execute a verb on blocks of one namespace, each listed once."""
    if verb.kind not in _MOVING:
        return await tiers.apply(verb, namespace, keys)
    mover = _Mover(tiers, verb, namespace, target)
    placing = Placing(keys.size)
    with _allowed(tiers, namespace, keys.size) as (now, most):
        step = max(1, STORE_BATCH_BYTES // namespace.image_bytes)
        for first in range(0, now, step):
            some = slice(first, min(first + step, now))
            placing.place(some, await mover.move(keys[some]))
    bound = "its tenant may move at once"
    placing.rule(
        slice(now, most),
        BlockState.DEFERRED,
        f"as much as {bound} is being moved; call again",
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
    """Reserve room for blocks to be moved.

    Yields how many may be moved now, and how many if no other verb were running.
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


class _Mover:
    """Moves blocks of one namespace between tiers, a batch at a time."""

    def __init__(
        self, tiers: TierStack, verb: Verb, namespace: Namespace, target: Tier | None
    ) -> None:
        self._tiers = tiers
        self._memory = tiers.memory
        self._namespace = namespace
        self._kind = verb.kind
        self._verb = verb
        # The tiers that give blocks up, among the tiers that only this store uses.
        self._above: Sequence[Tier] = ()
        self._gives_up = verb.kind is VerbKind.DEMOTE
        self._target: Tier | None
        if verb.kind is VerbKind.MOVE:
            # With many nodes, a block's placement determines where gets look for it.
            self._gives_up = target is not None and not verb.keep
            self._target = target or tiers.node(verb.place)
            self._above = tiers.below
        else:
            demotes = verb.kind is VerbKind.DEMOTE
            self._target = tiers.named(verb.place, demotes=demotes)
            if demotes and self._target is not None:
                self._above = tiers.below[: tiers.below.index(self._target)]
        self._above = [tier for tier in self._above if tier.owned]

    async def move(self, keys: Keys) -> Placement:
        """Move some blocks.

        Cancel safety: a running read or write is finished first.
        """
        target = self._target
        if target is None:
            if self._kind is VerbKind.DEMOTE:
                why = "there is no tier below memory"
                return all_placed(keys.size, BlockState.REFUSED, why)
            return await self._to_memory(keys)
        if self._kind is VerbKind.PREFETCH:
            told = await target.apply(self._verb, self._namespace, keys)
            placing = Placing(keys.size)
            placing.place(_ALL, told)
            lacking = told.missing.nonzero()[0]
            if lacking.size:
                placing.place(
                    lacking, (await self._copied(target, keys[lacking])).end()
                )
            return placing.end()
        if why := await self._unsafe(target, keys):
            return all_placed(keys.size, BlockState.REFUSED, why)
        placing = await self._copied(target, keys)
        there = placing.states == BlockState.DONE
        if self._gives_up and any_of(there):
            await self._give_up(target, keys, placing, there.nonzero()[0])
        return placing.end()

    async def _strayed(self, keys: Keys, placing: Placing, lacking: Ids) -> None:
        """Read blocks into memory from nodes that gets do not search."""
        for tier in self._tiers.below:
            for node in tier.nodes().values():
                left = lacking[placing.states[lacking] == BlockState.MISSING]
                if left.size:
                    # Treated like a store whose only lower tier is this node.
                    alone = copy(self._tiers)
                    alone.below = (node,)
                    found = await self._to_memory(keys[left], alone)
                    placing.place(left[found.done], found.selected(found.done))

    async def _to_memory(self, keys: Keys, tiers: TierStack | None = None) -> Placement:
        """Read blocks into memory, from this store's tiers or other nodes."""
        request = NamedRequest(self._namespace, keys)
        work = PrefetchOperation(tiers or self._tiers, (request,))
        await work.run()
        placing = Placing(keys.size)
        placing.place(_ALL, work.placement(request))
        here = self._memory.index.find(keys) >= 0
        gone = (placing.states == BlockState.DONE) & ~here
        placing.rule(gone, BlockState.DEFERRED, _AGAIN)
        placing.rule(here, BlockState.DONE)
        return placing.end()

    async def _copied(self, target: Tier, keys: Keys) -> Placing:
        """Write a tier's missing blocks to it, through memory."""
        placing = Placing(keys.size)
        held = await target.holds(keys)
        placing.rule(held, BlockState.DONE)
        lacking = (~held).nonzero()[0]
        if not lacking.size:
            return placing
        placing.place(lacking, await self._to_memory(keys[lacking]))
        if self._kind is VerbKind.MOVE:
            await self._strayed(keys, placing, lacking)
        if not target.taking:
            here = lacking[placing.states[lacking] == BlockState.DONE]
            why = f"{target.name}: {target.error}"
            placing.rule(here, BlockState.DEFERRED, why)
            return placing
        # From here to the pins there is no await.
        slots = self._memory.index.find(keys[lacking])
        here = lacking[slots >= 0]
        slots = slots[slots >= 0]
        if here.size:
            await self._write(target, keys, placing, here, slots)
        return placing

    async def _write(
        self, target: Tier, keys: Keys, placing: Placing, here: Ids, slots: Ids
    ) -> None:
        """Write blocks from their slots, and record the results."""
        index = self._memory.index
        named = keys[here]
        nbytes = self._namespace.image_bytes
        index.pin(named, slots)
        try:
            batch = Batch(
                named,
                index.orders(slots),
                self._memory.images(slots, nbytes),
                born=index.born(slots),
            )
            landed = await target.write(self._namespace, batch) == LANDED
        finally:
            self._memory.unpin(named, slots)
        placing.rule(here[landed], BlockState.DONE)
        large = target.too_large(self._namespace)
        state = BlockState.REFUSED if large else BlockState.DEFERRED
        why = f"{target.name} did not take it: {large or target.error}"
        placing.rule(here[~landed], state, why)

    async def _unsafe(self, target: Tier, keys: Keys) -> str:
        """Return why copies above a tier must be kept, or ""."""
        if not self._gives_up or target.durable:
            return ""
        for tier in self._above:
            if tier.durable and any_of(await tier.holds(keys)):
                return (
                    f"{target.name} loses its blocks at a restart, and {tier.name} "
                    f"does not"
                )
        return ""

    async def _give_up(
        self, target: Tier, keys: Keys, placing: Placing, there: Ids
    ) -> None:
        """Drop the copies above a tier for blocks that the tier now has."""
        if any(tier.durable for tier in self._above):
            try:
                await target.flush()
            except OSError as exc:
                placing.rule(there, BlockState.DEFERRED, str(exc))
                return
        # The tier may have evicted some of the blocks to make room for the others.
        held: Bits = await target.holds(keys[there])
        placing.rule(
            there[~held], BlockState.DEFERRED, f"{target.name} has no room for so many"
        )
        there = there[held]
        left = ~self._memory.let_go(keys[there])
        for tier in self._above:
            told = await tier.apply(Verb(VerbKind.DEMOTE), self._namespace, keys[there])
            left |= ~(told.done | told.missing)
        placing.rule(there[left], BlockState.DEFERRED, _STAYS)


_ALL: Final = slice(None)
