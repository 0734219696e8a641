"""A small get whose blocks come in one answer of a lower tier, without a task.

It requests all of its blocks at once. In the callback in which the answer arrives, the
images are copied straight into the caller's blocks, and the caller is woken. Memory
gets its copies after that, as far as there is room without waiting. If the answer lacks
blocks, a :class:`GetOperation` continues with these.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import ClassVar

import numpy as np

from kvwire.kv.blocks import Bits, BlockLists
from kvwire.kv.outcome import Outcome, Timings, outcome_of_all
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import PlanTemplate
from kvwire.memory.copy import copy
from kvwire_store.operations.get import GetOperation
from kvwire_store.operations.group_request import BlockRequest
from kvwire_store.tier_stack import TierStack
from kvwire_store.tiers.base import Tier, TierAnswer

logger: logging.Logger = logging.getLogger("kvwire.store")

Asked = tuple[PagedCache, BlockLists, PlanTemplate]


class AskedGet:
    """One get, from its request until memory has its copies.

    Args:
        tiers: The store's tiers.
        request: The blocks.
        asked: The caller's cache, its blocks, and the plan for them.
        answered: Called once, when the answer is there, or none can come. It gets what
            remains to be done; None if all blocks have landed.

    Attributes:
        blocks: The number of blocks.
        drained: Set when nothing touches the caller's blocks any more.
        keeps: Whether memory gets copies; then call :meth:`keep` after the answer.
    """

    verb: ClassVar[str] = "get"

    def __init__(
        self,
        tiers: TierStack,
        request: BlockRequest,
        asked: Asked,
        answered: Callable[[AskedGet, GetOperation | None], None],
    ) -> None:
        self._created = monotonic()
        self._tiers = tiers
        self._request = request
        self._asked = asked
        self._act = answered
        self.blocks: int = request.keys.size
        self.drained: asyncio.Event = asyncio.Event()
        self.keeps: bool = tiers.memory.keeps
        named = request.namespace.tenant
        self._tenant = tiers.tenants.number(named) if named else 0
        # When the answer was there, and when the caller's blocks had its images.
        self._first = self._last = 0.0
        # When the blocks count as put, for tenants whose blocks expire.
        self._born: float | None = None
        self._answer: TierAnswer | None = None

    @property
    def age_s(self) -> float:
        """The seconds since the call."""
        return monotonic() - self._created

    def begin(self, tier: Tier) -> bool:
        """Request all blocks from a tier; return whether they were requested."""
        memory = self._tiers.memory
        index = memory.index
        request = self._request
        keys = request.keys
        nbytes = request.namespace.image_bytes
        if (
            request.repeats
            or not index.fits(nbytes, self._tenant)
            or memory.has_any(keys)
        ):
            return False
        if index.shares.expire:
            self._born = index.now()
        if self.keeps:
            # Until they are in memory, other calls wait for these blocks.
            memory.in_flight.begin(keys)
        try:
            begun = tier.ask(request.namespace, keys, self._answered)
        except Exception:  # noqa: BLE001 - the long way raises it, where it lasts
            begun = False
        if not begun and self.keeps:
            memory.in_flight.end(keys)
        return begun

    def end(self) -> Outcome:
        """Count the end of a get whose blocks have all landed; return the outcome."""
        self.drained.set()
        ended = monotonic()
        tiers = self._tiers
        request = self._request
        namespace = request.namespace
        tiers.namespaces[namespace.digest] = namespace
        for tier in tiers.below[1:]:  # the first one has counted this use
            tier.touch(request.keys)
        nbytes = self.blocks * namespace.image_bytes
        for counters in tiers.counters_of(namespace):
            counters.get_ended(nbytes, there=self.blocks, blocks=self.blocks)
        timings = Timings(
            queue_s=self._first - self._created,
            wire_s=self._last - self._first,
            commit_s=ended - self._last,
        )
        _, lists, template = self._asked
        return outcome_of_all(template, lists, timings, 1, template.nbytes)

    def keep(self) -> None:
        """Copy the blocks that have arrived into memory, as far as there is room."""
        answer = self._answer
        try:
            if answer is not None and answer.images:
                self._copy(answer)
        finally:
            self._answer = None
            self._tiers.memory.in_flight.end(self._request.keys)

    def _copy(self, answer: TierAnswer) -> None:
        keys = self._request.keys
        orders = np.frombuffer(answer.orders, np.uint8)
        below: Bits | bool = True
        if answer.kept:
            below = np.frombuffer(answer.kept, np.bool_)
        if answer.landed is not None:
            here = answer.landed
            keys = keys[here]
            orders = orders[here]
            below = below if isinstance(below, bool) else below[here]
        self._tiers.memory.fill_now(
            keys,
            answer.images,
            self._request.namespace.image_bytes,
            self._tenant,
            orders,
            born=self._born,
            below=below,
        )

    def _answered(self, answer: TierAnswer | None) -> None:
        work: GetOperation | None = None
        try:
            if answer is None or not self._arrived(answer):
                work = self._rest(answer)
        except Exception:
            # Lack of memory, or a bug, ends no other call of this client.
            logger.exception("the blocks of an answer are requested again")
            work = self._rest(None)
        else:
            self._answer = answer
        self._act(self, work)

    def _arrived(self, answer: TierAnswer) -> bool:
        """Copy the images of all blocks; return False if they do not come alike."""
        orders = answer.orders
        if answer.landed is not None or orders.count(orders[0]) < self.blocks:
            return False
        self._first = monotonic()
        copy(answer.images, self._request.all_fragments(orders[0]))
        self._last = monotonic()
        return True

    def _rest(self, answer: TierAnswer | None) -> GetOperation:
        """Return the work that is left after an answer, or without one."""
        work = GetOperation(self._tiers, (self._request,))
        work.created = self._created
        work.drained = self.drained
        work.asked = self._asked
        if answer is not None:
            work.took(self._request, self._tiers.below[0], answer)
        return work
