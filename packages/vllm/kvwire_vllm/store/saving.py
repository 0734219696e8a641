"""A worker's saves: sends blocks to the store, with a bound on its backlog.

::

    waiting     the request keeps its blocks anyway, so this costs nothing
    under way   the store copies the block to its memory, then to the tiers below; at
                most a quarter of that memory is under way, so that a copy never waits
                for room, even if a tier below is stuck
    again       a tier below failed to take the block, so a later get of the chain would
                end there; it is put once more after a pause, while the request runs
    skipped     the request was preempted, or ended `hold_s` ago; the log names it

So a slow store delays no step and no other request: a preempted request's blocks are
free once they are copied, and an ended request's after `hold_s` at most.

All of it runs on the worker's thread, except for the futures' ends on the store's.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvwire_vllm.metrics import Observed, observe
from kvwire_vllm.store.scheduler import NamedBlocks

logger: logging.Logger = logging.getLogger("kvwire.vllm")

# The pause before blocks are put again; doubled each time, since a server may stay
# away.
_PAUSE_S: Final = 1.0
_PAUSE_S_MAX: Final = 30.0


class Saving(NamedTuple):
    """A put at the store."""

    free: Future[None]  # done when nothing reads the blocks any more
    over: Future[list[int]]  # positions of the blocks that the store then lacks


Put = Callable[[NamedBlocks], Saving]
"""Begins to save blocks that are written."""


@dataclass(slots=True, eq=False)
class _Request:
    """The saves of one request's blocks."""

    id: str
    waiting: deque[tuple[NamedBlocks, float]] = field(default_factory=deque)
    again: list[NamedBlocks] = field(default_factory=list)
    reading: list[Future[None]] = field(default_factory=list)
    until: float = 0.0  # when its blocks are skipped; 0 while it runs

    @property
    def is_free(self) -> bool:
        """Whether its blocks are free: nothing reads them or will read them."""
        return not self.waiting and all(one.done() for one in self.reading)


@dataclass(slots=True, eq=False)
class _Under:
    """Blocks that are being saved."""

    request: _Request
    named: NamedBlocks
    filled: float  # when the step that filled them was over
    saving: Saving
    over: deque[_Under]  # where it goes when the save is over
    ended: float = 0.0  # when that was; an idle engine looks much later

    def end(self, _: Future[list[int]]) -> None:
        """Record the end, on the store's thread."""
        self.ended = time.monotonic()
        self.over.append(self)


class SaveQueue:
    """Saves blocks as they fill.

    Args:
        put: See :data:`Put`.
        blocks_max: The most blocks under way at once.
        hold_s: How long an ended request's blocks may wait for their turn.
        pause_s: How long to wait before a failed save is tried again, at first.
    """

    def __init__(
        self, put: Put, blocks_max: int, hold_s: float, *, pause_s: float = _PAUSE_S
    ) -> None:
        self._put = put
        self._blocks_max = blocks_max
        self._hold_s = hold_s
        self._requests: dict[str, _Request] = {}
        # The requests with waiting blocks, in order.
        self._waiting: dict[_Request, None] = {}
        self._under: dict[_Under, None] = {}
        self._under_blocks = 0
        # Those that have ended; the store's thread appends. bounded: blocks_max
        self._over: deque[_Under] = deque()
        self._leaving: dict[_Request, None] = {}
        # The requests with blocks to put again.
        self._failing: dict[_Request, None] = {}
        self._again_at = 0.0
        self._least_pause_s = self._pause_s = pause_s
        self._observed: Observed = {}

    @property
    def behind(self) -> int:
        """The number of filled blocks that are not stored yet."""
        waiting = sum(
            len(named.ids) for one in self._waiting for named, _ in one.waiting
        )
        again = sum(len(named.ids) for one in self._failing for named in one.again)
        return waiting + again + self._under_blocks

    def add(self, saves: Iterable[NamedBlocks]) -> None:
        """Queue written blocks, and begin as many saves as the backlog allows."""
        now = time.monotonic()
        for named in saves:
            one = self._requests.get(named.request_id)
            if one is None:
                one = self._requests[named.request_id] = _Request(named.request_id)
            one.waiting.append((named, now))
            self._waiting[one] = None
        self._begin(now)

    def fence(self, request_id: str) -> None:
        """Wait until nothing reads a preempted request's blocks."""
        one = self._requests.get(request_id)
        if one is not None:
            self._skip(one, "its request was preempted")
            wait(one.reading)
            if one not in self._leaving:
                del self._requests[request_id]

    def leave(self, request_id: str) -> None:
        """Record a request's end; from now on its blocks are held only to be saved."""
        one = self._requests.setdefault(request_id, _Request(request_id))
        if one.again:
            # They are in the store's memory, from which a tier may take them later.
            again = sum(len(named.ids) for named in one.again)
            observe(self._observed, "skipped_blocks", again)
            one.again = []
            del self._failing[one]
        one.until = time.monotonic() + self._hold_s
        self._leaving[one] = None

    def freed(self) -> set[str]:
        """Return the ended requests whose blocks are free, each once."""
        now = time.monotonic()
        if self._over:
            self._collect(now)
        if self._waiting or self._failing:
            self._begin(now)
        freed: set[str] = set()
        for one in [*self._leaving]:
            if now >= one.until and one.waiting:
                self._skip(one, f"the store is {self.behind} blocks behind")
            if one.is_free:
                del self._leaving[one], self._requests[one.id]
                freed.add(one.id)
        return freed

    def forget(self) -> None:
        """Drop the waiting blocks, because the store was cleared."""
        for one in [*self._waiting, *self._failing]:
            one.waiting.clear()
            one.again.clear()
        self._waiting.clear()
        self._failing.clear()

    def wait_idle(self, others: Iterable[Future[Any]], timeout_s: float) -> None:
        """Release the interpreter lock until a save has ended."""
        waiting: list[Future[Any]] = [
            *others,
            *(f for one in self._leaving for f in one.reading),
        ]
        if any(one.waiting for one in self._leaving):
            waiting += [one.saving.over for one in self._under]
        waiting = [one for one in waiting if not one.done()]
        if waiting:
            wait(waiting, timeout_s, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Save the waiting blocks, within the time limit for an ended request."""
        until = time.monotonic() + self._hold_s
        while self._waiting and (left := until - time.monotonic()) > 0:
            self._begin(time.monotonic())
            overs = [one.saving.over for one in self._under]
            wait(overs, left, return_when=FIRST_COMPLETED)
            self._collect(time.monotonic())
        for one in [*self._waiting]:
            self._skip(one, f"the store is {self.behind} blocks behind")
        wait([one.saving.free for one in self._under])

    def take_observed(self) -> Observed:
        """Return the observations since the last call; see `metrics.STORE_FIELDS`."""
        if self._waiting or self._under or self._failing:
            observe(self._observed, "behind_blocks", self.behind)
        observed = self._observed
        self._observed = {}
        return observed

    # --- inside -----------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Start as many saves as the limit allows."""
        room = self._blocks_max - self._under_blocks
        if self._failing and now >= self._again_at:
            for one in [*self._failing]:
                one.waiting.extendleft((named, now) for named in reversed(one.again))
                one.again = []
                self._waiting[one] = None
            self._failing.clear()
        while self._waiting and room > 0:
            one = next(iter(self._waiting))
            del self._waiting[one]
            named, filled = one.waiting.popleft()
            if len(named.ids) > room:
                one.waiting.appendleft((_part(named, slice(room, None)), filled))
                named = _part(named, slice(room))
            if one.waiting:
                self._waiting[one] = None  # after all others
            room -= len(named.ids)
            saving = self._put(named)
            one.reading.append(saving.free)
            under = _Under(one, named, filled, saving, self._over)
            self._under[under] = None  # bounded: blocks_max
            self._under_blocks += len(named.ids)
            saving.over.add_done_callback(under.end)

    def _collect(self, now: float) -> None:
        """Collect the results of ended puts."""
        while self._over:
            one = self._over.popleft()
            del self._under[one]
            self._under_blocks -= len(one.named.ids)
            request = one.request
            request.reading = [f for f in request.reading if not f.done()]
            lacking = one.saving.over.result()
            if not lacking:
                self._pause_s = self._least_pause_s
                observe(self._observed, "save_s", one.ended - one.filled)
            elif self._requests.get(request.id) is request and not request.until:
                named = one.named
                if not self._failing:
                    self._again_at = now + self._pause_s
                    self._pause_s = min(2 * self._pause_s, _PAUSE_S_MAX)
                self._failing[request] = None
                hashes = [named.hashes[at] for at in lacking]
                ids = [named.ids[at] for at in lacking]
                request.again.append(NamedBlocks(request.id, hashes, ids))
            else:
                observe(self._observed, "skipped_blocks", len(lacking))

    def _skip(self, one: _Request, why: str) -> None:
        """Drop a request's waiting blocks."""
        again = sum(len(named.ids) for named in one.again)
        skipped = again + sum(len(named.ids) for named, _ in one.waiting)
        one.waiting.clear()
        one.again = []
        self._waiting.pop(one, None)
        self._failing.pop(one, None)
        if skipped:
            observe(self._observed, "skipped_blocks", skipped)
            logger.warning(
                "request %s: %d blocks were not saved: %s", one.id, skipped, why
            )


def _part(named: NamedBlocks, part: slice) -> NamedBlocks:
    return NamedBlocks(named.request_id, named.hashes[part], named.ids[part])
