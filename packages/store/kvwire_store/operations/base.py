"""The common part of a put and a get: batches, reasons, and an exact end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import ClassVar, Final

import numpy as np

from kvwire.aio import gather_all, settler
from kvwire.errors import error_text
from kvwire.kv.blocks import Bits, BlockLists, Codes, Ids
from kvwire.kv.fragments import Fragments
from kvwire.kv.landed import Landed
from kvwire.kv.outcome import (
    Outcome,
    Timings,
    outcome_of,
    outcome_of_all,
    timings_of,
)
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import PlanSide, PlanTemplate, TransferPlan
from kvwire.memory.copy import copy
from kvwire.memory.device.device_copies import DeviceFailed
from kvwire_store.counters import StoreCounters
from kvwire_store.keys import Orders
from kvwire_store.limits import STORE_BATCH_BYTES
from kvwire_store.operations.group_request import BlockRequest
from kvwire_store.placement import BlockState, Placement, Placing
from kvwire_store.threads import TURN_BYTES
from kvwire_store.tier_stack import TierStack

# One batch moves between memory and a disk while another one is copied.
_LANES: Final = 2
_LANDED: Final = 0


class Operation(ABC):
    """The movement of one call's blocks. Subclassed for the two directions.

    Attributes:
        verb: The name of the call.
        side: The side that the caller's cache would have in a transfer.
        batch_bytes: The most bytes that are moved before other work gets a turn.
        blocks: The number of blocks.
        nbytes: The bytes of their images.
        is_small: Whether ``nbytes`` is small enough to be copied in one turn of the
            loop.
        asked: For a caller with a cache: the cache, its blocks, and the plan for them.
        created: When it was called, on the monotonic clock.
        drained: Set when nothing touches the caller's blocks any more. It stays unset
            if a device failed while it wrote to them.
    """

    verb: ClassVar[str]
    side: ClassVar[PlanSide]
    batch_bytes: ClassVar[int] = STORE_BATCH_BYTES

    def __init__(
        self,
        tiers: TierStack,
        requests: Sequence[BlockRequest],
        after: object = None,
    ) -> None:
        self.tiers = tiers
        self.asked: tuple[PagedCache, BlockLists, PlanTemplate] | None = None
        self.drained: asyncio.Event = asyncio.Event()
        self._after = after
        self._quarantined = False
        self._requests = requests
        self._reasons: list[str] = [""]
        # The state that each reason means for a verb.
        self._states: list[BlockState] = [BlockState.DONE]
        self._codes: dict[BlockRequest, Codes] = {}
        # For a get: the first lower tier that has not been tried for each block.
        self._next: dict[BlockRequest, Ids] = {}
        # The positions that are left to move; all of them without an entry.
        self._rest: dict[BlockRequest, Ids] = {}
        # Blocks whose slots were all released at once, in the order of the chain.
        self._released: set[BlockRequest] = set()
        # Blocks that memory does not have.
        self.elsewhere: set[BlockRequest] = set()
        self.blocks: int = 0
        self.nbytes: int = 0
        for request in requests:
            self._codes[request] = np.zeros(request.keys.size, np.uint16)
            self.blocks += request.keys.size
            self.nbytes += request.keys.size * request.namespace.image_bytes
        self._left = self.blocks
        self.is_small: bool = self.nbytes <= TURN_BYTES
        self.created: float = monotonic()
        self._first = self._last = self._ended = 0.0

    async def run(self) -> Outcome | None:
        """Move every block that can be moved, and record the result of each.

        Returns:
            The outcome of a transfer with the plan in :attr:`asked`.

        Cancel safety: a running copy is finished first.
        """
        try:
            if self._after is not None:
                await self._fired()
            if self.nbytes <= self.batch_bytes:
                for request in self._requests:
                    rest = self._rest.get(request)
                    if rest is None:
                        rest = np.arange(request.keys.size)
                    await self._move(request, rest)
            else:
                batches = iter(self._batches())
                await gather_all(*(self._lane(batches) for _ in range(_LANES)))
        finally:
            if not self._quarantined:
                self.drained.set()
        if len(self._reasons) > 1:
            await self.explain()
        return self.end()

    @property
    def is_over(self) -> bool:
        """Whether no block is left to move."""
        return not self._left

    async def _fired(self) -> None:
        """Wait for the caller's kernels here, so that other calls do not wait too."""
        assert self.asked is not None
        cache = self.asked[0]
        assert cache.device is not None, "host memory has no events"
        devices = self.tiers.threads.devices
        with suppress(Exception):  # the copy behind it raises the same error again
            waiters = devices.waiters(cache.device, self._after)
            if waiters is not None:
                over = asyncio.get_running_loop().create_future()
                waiters.wait(self._after, settler(over), source=object())
                await over

    def end(self) -> Outcome | None:
        """Count the end of the call, mark its blocks as used, return the outcome."""
        self._ended = monotonic()
        landed = landed_bytes = 0
        for request in self._requests:
            released = request in self._released
            here = request not in self.elsewhere
            self.tiers.touch(request.keys, released=released, here=here)
            count = int(request.keys.size)
            if len(self._reasons) > 1:
                count = int(np.add.reduce(self._codes[request] == _LANDED))
            landed += count
            landed_bytes += count * request.namespace.image_bytes
        for counters in self.tiers.counters_of(self._requests[0].namespace):
            self.count(counters, landed_bytes, landed)
        return None if self.asked is None else self._outcome(*self.asked)

    def _outcome(
        self, cache: PagedCache, lists: BlockLists, template: PlanTemplate
    ) -> Outcome:
        end = self._ended
        first = self._first or end
        last = self._last or end
        timings = timings_of(
            queue_s=first - self.created, wire_s=last - first, commit_s=end - last
        )
        if len(self._reasons) == 1 or not self.reasons:
            return outcome_of_all(template, lists, timings, 1, template.nbytes)
        here, peer = template.ends
        plan = TransferPlan(cache, lists, peer, self.side, local=here)
        return self._partial(plan, timings)

    def landed(self, request: BlockRequest) -> Bits:
        """Return the blocks of a request that have landed."""
        here: Bits = self._codes[request] == _LANDED
        return here

    def placement(self, request: BlockRequest) -> Placement:
        """Return the states of a request's blocks, as a verb reports them."""
        codes = self._codes[request]
        placing = Placing(codes.size, BlockState.DONE)
        for code, reason in enumerate(self._reasons[1:], 1):
            placing.rule(codes == code, self._states[code], reason)
        return placing.end()

    @property
    def age_s(self) -> float:
        """The seconds since the call."""
        return monotonic() - self.created

    @property
    def reasons(self) -> list[str]:
        """The reasons for missing blocks, each once."""
        used = {code for codes in self._codes.values() for code in codes.tolist()}
        return [self._reasons[code] for code in sorted(used) if code != _LANDED]

    @abstractmethod
    async def step(self, request: BlockRequest, positions: Ids) -> Bits:
        """Continue with some blocks of one group request.

        Returns:
            The blocks that are settled; the others are passed in again.

        Cancel safety: a running copy is finished first.
        """

    @abstractmethod
    def count(self, counters: StoreCounters, nbytes: int, landed: int) -> None:
        """Count the end of the call, with the bytes and blocks that landed."""

    def turns(self, request: BlockRequest) -> Iterable[Ids]:
        """Return the positions in the batches to process, each batch ascending."""
        return (np.arange(request.keys.size),)

    async def explain(self) -> None:  # noqa: B027 - one direction has nothing to say
        """Complete the reasons for missing blocks, once every result is known.

        Cancel safety: safe, it only reads.
        """

    # --- for the two directions -------------------------------------------------------

    def lost(
        self,
        request: BlockRequest,
        positions: Ids,
        reason: str,
        state: BlockState = BlockState.DEFERRED,
    ) -> None:
        """Record that blocks do not land, with the reason and the state for a verb."""
        if reason not in self._reasons:
            self._reasons.append(reason)
            self._states.append(state)
        self._codes[request][positions] = self._reasons.index(reason)

    def lacking(self, request: BlockRequest, reason: str) -> Ids:
        """Return the positions that do not land for a given reason."""
        if reason not in self._reasons:
            return np.empty(0, np.int64)
        here: Bits = self._codes[request] == self._reasons.index(reason)
        return here.nonzero()[0]

    def settled(self, blocks: int) -> None:
        """Count the caller's blocks that are free again."""
        self._left -= blocks
        if not self._left and not self._quarantined:
            self.drained.set()

    async def copy(
        self,
        request: BlockRequest,
        positions: Ids,
        images: Fragments,
        orders: Orders | int,
    ) -> None:
        """Copy images into the caller's cache or out of it, large ones on a thread.

        Args:
            request: The request with the blocks.
            positions: The blocks' positions in it.
            images: The image of each.
            orders: The order of each, if they enter the cache; or the one in which they
                leave it.

        Cancel safety: the copy is finished first.
        """
        threads = self.tiers.threads
        into_cache = not isinstance(orders, int)
        self._first = self._first or monotonic()
        for ends in self._ends(request, positions, images, orders):
            device = ends[into_cache].device
            if device is not None:
                try:
                    await threads.run(partial(threads.devices.copy, *ends, self._after))
                except DeviceFailed:
                    self._quarantined = into_cache
                    raise
            elif images.nbytes > TURN_BYTES:
                await threads.run(partial(copy, *ends))
            else:
                copy(*ends)
        self._last = monotonic()

    def copy_now(
        self, request: BlockRequest, images: Fragments, orders: Orders
    ) -> None:
        """Copy all images of a request into the caller's cache, in this turn."""
        positions = np.arange(request.keys.size)
        for ends in self._ends(request, positions, images, orders):
            copy(*ends)

    def _ends(
        self,
        request: BlockRequest,
        positions: Ids,
        images: Fragments,
        orders: Orders | int,
    ) -> list[tuple[Fragments, Fragments]]:
        """Return sources and destinations, grouped by order."""
        if isinstance(orders, int):
            return [(request.fragments(positions, orders), images)]
        listed = set(orders.tolist())
        if len(listed) == 1:
            return [(images, request.fragments(positions, listed.pop()))]
        parts = [(order, orders == order) for order in listed]
        return [
            (images.selected(which), request.fragments(positions[which], order))
            for order, which in parts
        ]

    # --- inside -----------------------------------------------------------------------

    def _batches(self) -> list[tuple[BlockRequest, Ids]]:
        batches: list[tuple[BlockRequest, Ids]] = []
        for request in self._requests:
            size = request.keys.size
            step = max(1, self.batch_bytes // request.namespace.image_bytes)
            if size <= step:
                batches.append((request, np.arange(size)))
                continue
            for positions in self.turns(request):
                # The tail first: where a chain has no room, its head is what stays.
                batches += (
                    (request, positions[first : first + step])
                    for first in reversed(range(0, positions.size, step))
                )
        return batches

    async def _lane(self, batches: Iterator[tuple[BlockRequest, Ids]]) -> None:
        for request, positions in batches:
            await self._move(request, positions)

    async def _move(self, request: BlockRequest, positions: Ids) -> None:
        while positions.size:
            try:
                positions = positions[~await self.step(request, positions)]
            except DeviceFailed as exc:
                self.lost(request, positions, error_text(exc))
                return

    def _partial(self, plan: TransferPlan, timings: Timings) -> Outcome:
        """Return the outcome when some blocks have not landed."""
        landed = Landed(plan)
        granules = []
        for index, request in enumerate(self._requests):
            walk = plan.groups[index]
            per_hash = request.namespace.spec.block_tokens // walk.granule_tokens
            codes = np.repeat(self._codes[request], per_hash)
            landed.mark_granules(index, codes == _LANDED)
            per_block = plan.maps[index].granules_per_block
            granules.append((walk.group, codes.reshape(-1, per_block)))
        reasons = [
            (text, {name: (codes == code).any(axis=1) for name, codes in granules})
            for code, text in enumerate(self._reasons)
            if code != _LANDED
        ]
        return outcome_of(landed, otherwise="", reasons=reasons, timings=timings)
