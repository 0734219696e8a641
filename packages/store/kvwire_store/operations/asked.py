"""A small get whose blocks come in one answer of a lower tier, without a task.

It requests all of its blocks at once. In the callback in which the answer arrives, the
images are copied straight into the caller's blocks, and the caller is woken. Memory
gets its copies after that, those of several gets together, as far as there is room
without waiting. If the answer lacks blocks, a :class:`GetOperation` continues with
these.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from time import monotonic
from typing import ClassVar, Final

import numpy as np

from kvwire.kv.blocks import Bits, BlockLists
from kvwire.kv.fragments import Fragments
from kvwire.kv.outcome import Outcome, outcome_of_all, timings_of
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import PlanTemplate
from kvwire.limits import MIB
from kvwire.memory.copy import address_of, copy
from kvwire_store.namespace import Namespace
from kvwire_store.operations.get import GetOperation
from kvwire_store.operations.group_request import BlockRequest
from kvwire_store.tier_stack import TierStack
from kvwire_store.tiers.base import Tier, TierAnswer
from kvwire_store.tiers.memory import MemoryTier

logger: logging.Logger = logging.getLogger("kvwire.store")

# Copied into memory in some 100 us.
_TOGETHER_BYTES: Final = MIB
# Long enough for gets in a row, and short beside the use of memory.
_TOGETHER_S: Final = 0.05

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
        keeps: Whether memory gets copies; then pass it to :class:`LaterFills` after the
            answer.
        answer: The answer, once it is there.
        born: When the blocks count as put, for tenants whose blocks expire.
        tenant: The number of the tenant that owns them.
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
        self.request: BlockRequest = request
        self._asked = asked
        self._act = answered
        self.blocks: int = request.keys.size
        self.drained: asyncio.Event = asyncio.Event()
        self.keeps: bool = tiers.memory.keeps
        named = request.namespace.tenant
        self.tenant: int = tiers.tenants.number(named) if named else 0
        # When the answer was there, and when the caller's blocks had its images.
        self._first = self._last = 0.0
        self.born: float | None = None
        self.answer: TierAnswer | None = None

    @property
    def age_s(self) -> float:
        """The seconds since the call."""
        return monotonic() - self._created

    def begin(self, tier: Tier) -> bool:
        """Request all blocks from a tier; return whether they were requested."""
        memory = self._tiers.memory
        index = memory.index
        request = self.request
        keys = request.keys
        nbytes = request.namespace.image_bytes
        if memory.has_any(keys):
            memory.in_flight.hurry()
            return False
        if request.repeats or not index.fits(nbytes, self.tenant):
            return False
        if index.shares.expire:
            self.born = index.now()
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
        request = self.request
        namespace = request.namespace
        tiers.namespaces[namespace.digest] = namespace
        for tier in tiers.below[1:]:  # the first one has counted this use
            tier.touch(request.keys)
        nbytes = self.blocks * namespace.image_bytes
        for counters in tiers.counters_of(namespace):
            counters.get_ended(nbytes, there=self.blocks, blocks=self.blocks)
        timings = timings_of(
            queue_s=self._first - self._created,
            wire_s=self._last - self._first,
            commit_s=ended - self._last,
        )
        _, lists, template = self._asked
        return outcome_of_all(template, lists, timings, 1, template.nbytes)

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
            self.answer = answer
        self._act(self, work)

    def _arrived(self, answer: TierAnswer) -> bool:
        """Copy the images of all blocks; return False if they do not come alike."""
        orders = answer.orders
        if answer.landed is not None or orders.count(orders[0]) < self.blocks:
            return False
        self._first = monotonic()
        copy(answer.images, self.request.all_fragments(orders[0]))
        self._last = monotonic()
        return True

    def _rest(self, answer: TierAnswer | None) -> GetOperation:
        """Return the work that is left after an answer, or without one."""
        work = GetOperation(self._tiers, (self.request,))
        work.created = self._created
        work.drained = self.drained
        work.asked = self._asked
        if answer is not None:
            work.took(self.request, self._tiers.below[0], answer)
        return work


class LaterFills:
    """Copies the blocks of gets into memory, several gets together.

    Most of what a fill costs is the same for one block and for many. A call that needs
    one of these blocks waits for none of this: it has them filled at once, by
    :attr:`InFlightFills.hurry`, or has waited for them since before the answer. One
    event loop.
    """

    def __init__(self, memory: MemoryTier) -> None:
        self._memory = memory
        memory.in_flight.hurry = self.fill
        # bounded: _TOGETHER_BYTES, and the answers of one turn of the loop
        self._gets: list[AskedGet] = []
        self._nbytes = 0
        self._timer: asyncio.Handle | None = None

    def add(self, get: AskedGet, loop: asyncio.AbstractEventLoop) -> None:
        """Copy a get's blocks, after its caller has gone on."""
        if get.answer is None or not get.answer.images:
            self._memory.in_flight.end(get.request.keys)
            return
        self._gets.append(get)
        before = self._nbytes
        self._nbytes = before + len(get.answer.images)
        full = before < _TOGETHER_BYTES <= self._nbytes
        if full or self._memory.in_flight.awaited(get.request.keys):
            # The caller goes on first, in the turn after the next one.
            loop.call_soon(loop.call_soon, self.fill)
        elif not before:
            self._timer = loop.call_later(_TOGETHER_S, self.fill)

    def fill(self) -> None:
        """Copy all blocks that wait here, as far as there is room."""
        gets = self._gets
        if not gets:
            return
        self._gets = []
        self._nbytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            for (namespace, _), alike in groupby(gets, _kind):
                self._fill(namespace, [*alike][::-1])  # the last get is used last
        except Exception:
            # Its callers have these blocks already.
            logger.exception("blocks that have landed could not be kept in memory")
        finally:
            for get in gets:
                self._memory.in_flight.end(get.request.keys)

    def _fill(self, namespace: Namespace, gets: Sequence[AskedGet]) -> None:
        """Copy the blocks of gets that differ in nothing else."""
        first = gets[0]
        answers = [get.answer for get in gets if get.answer is not None]
        lines = [answer.images for answer in answers]
        keys = np.concatenate([get.request.keys for get in gets])
        orders = np.frombuffer(b"".join([a.orders for a in answers]), np.uint8)
        below: Bits | bool = True
        if answers[0].kept:
            below = np.frombuffer(answers[0].kept, np.bool_)
        if answers[0].landed is not None:
            here = answers[0].landed
            keys = keys[here]
            orders = orders[here]
            below = below if isinstance(below, bool) else below[here]
        images = Fragments(
            np.array(list(map(address_of, lines)), np.uint64),
            np.array(list(map(len, lines)), np.uint64),
            owner=lines,
            writable=False,
        )
        self._memory.fill_now(
            keys,
            images,
            namespace.image_bytes,
            first.tenant,
            orders,
            born=first.born,
            below=below,
        )


def _kind(get: AskedGet) -> tuple[Namespace, object]:
    """Return what gets have in common whose blocks are copied together."""
    answer = get.answer
    assert answer is not None
    plain = answer.landed is None and not answer.kept and get.born is None
    return get.request.namespace, None if plain else get
