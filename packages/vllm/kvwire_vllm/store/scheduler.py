"""The scheduler's side: it decides about loads and saves, and when requests are free.

Nothing here moves a byte. Every block that vLLM computes is saved, for prompts and
answers alike, as soon as its tokens are known and its KV is written. A prompt's stored
leading blocks are loaded before it is scheduled. Its last token is never loaded,
because vLLM computes it itself.

A request keeps its blocks while any worker saves or loads them. So an ended request is
freed when all workers have reported, and the workers wait for a preempted request's
blocks. If a request ends before its load was reported, that report frees it: vLLM
expects one report per request, not two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvwire.errors import UsageError
from kvwire.kv.hashing import HashScheme
from kvwire_vllm.identity import identity_of, tokens_say_all
from kvwire_vllm.metadata import ScheduledRequest, scheduled_requests

logger: logging.Logger = logging.getLogger("kvwire.vllm")

Ask = Callable[[Sequence[bytes]], Future[int]]
"""Returns how many leading blocks of a chain the store has; never fails."""

# An answer from this host takes a fraction of this; asking again costs a step.
_PATIENCE_S: Final = 0.002


class NamedBlocks(NamedTuple):
    """One request's blocks, each with the hash of its chain."""

    request_id: str  # vLLM's name for the request
    hashes: list[bytes]  # hashes of full blocks, in token order
    ids: list[int]  # their block ids


@dataclass(slots=True, kw_only=True)
class StoreStep:
    """The metadata that the workers need for one step."""

    loads: list[NamedBlocks] = field(default_factory=list)  # blocks to load
    # Blocks to save that earlier passes have written.
    written: list[NamedBlocks] = field(default_factory=list)
    # Blocks to save that are written when the step's forward pass is over.
    saves: list[NamedBlocks] = field(default_factory=list)
    # Whether the store was cleared, so that waiting blocks are not saved.
    forgotten: bool = False
    # Requests whose blocks may be overwritten in this step.
    fenced: set[str] = field(default_factory=set)
    # Requests that have ended; workers report when their blocks have drained.
    leaving: set[str] = field(default_factory=set)
    idle: bool = False  # the step computes nothing; it only collects arrivals


@dataclass(slots=True)
class _Tracked:
    """The state of one request."""

    request: Any  # vLLM's request; only read
    # Hashes of its full blocks, as far as they were needed.
    hashes: list[bytes] = field(default_factory=list)
    # Its block ids, as far as vLLM has allocated them.
    ids: list[int] = field(default_factory=list)
    # The store's answer, if it was asked since the request was last scheduled.
    asked: Future[int] | None = None
    computed: int = 0  # tokens that vLLM had computed at that time
    saved: int = 0  # blocks that the store has, or that workers save
    busy: bool = False  # whether workers may be saving its blocks
    # Whether saving it has stopped, because a token id is invalid, or because its KV
    # was computed before the store was cleared.
    nameless: bool = False
    loading: bool = False  # whether it is loading and the workers have not reported yet


class StoreScheduler:
    """The connector's part in the scheduler's process."""

    def __init__(self, block_tokens: int, ask: Ask) -> None:
        self._block_tokens = block_tokens
        self._scheme = HashScheme(block_tokens)
        self._ask = ask
        self._requests: dict[str, _Tracked] = {}
        # By request, the tokens with which its next block is full; 0 if it has no
        # blocks. In most steps a request gets one token, and need not be visited.
        self._due: dict[str, int] = {}
        self._step = StoreStep()
        # Ended requests that some worker has not freed yet.
        self._leaving: set[str] = set()

    @property
    def waiting(self) -> bool:
        """Return whether the workers need more steps, even without computation."""
        return bool(self._leaving)

    def begun(self, request: Any) -> None:
        """Look up a new request in the store."""
        if tokens_say_all(request):
            self._answer(self._tracked(request))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many more tokens the store has; None if that is still unknown."""
        if not tokens_say_all(request) or getattr(
            request, "skip_reading_prefix_cache", False
        ):
            return 0, False
        tracked = self._tracked(request)
        # Its last token is computed in any case, so nothing is left to load if vLLM has
        # all other full blocks. Then the request does not wait for the store.
        usable = (len(request.all_token_ids) - 1) // self._block_tokens
        if usable * self._block_tokens <= computed:
            return 0, False
        asked = self._answer(tracked)
        try:
            found = asked.result(_PATIENCE_S) * self._block_tokens - computed
        except TimeoutError:
            return None, False
        tracked.computed = computed
        return (found, True) if found > 0 else (0, False)

    def allocated(
        self, request: Any, tables: Sequence[Sequence[int]], external: int
    ) -> None:
        """Record a request's blocks, some of which must be loaded."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        tracked.asked = None
        if external:
            first = tracked.computed // self._block_tokens
            stop = first + external // self._block_tokens
            tracked.loading = True
            tracked.saved = stop
            self._step.loads.append(
                NamedBlocks(
                    request.request_id,
                    tracked.hashes[first:stop],
                    list(tables[0][first:stop]),
                )
            )

    def step(self, output: Any) -> StoreStep:
        """Return the metadata for the workers in a scheduled step."""
        step = self._step
        self._step = StoreStep()
        for request_id in getattr(output, "preempted_req_ids", None) or ():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                self._due.pop(request_id, None)
                tracked.ids = []
                tracked.saved = 0  # a worker may not have begun to save some of them
                tracked.busy = False
            step.fenced.add(request_id)
        step.idle = not output.num_scheduled_tokens
        for one in scheduled_requests(output, self._requests, self._due):
            self._scheduled(step, one)
            tracked = self._requests[one.id]
            due = (tracked.saved + 1) * self._block_tokens if tracked.ids else 0
            self._due[one.id] = due  # bounded: running requests
        return step

    def reported(self, sent: Iterable[str], received: Iterable[str]) -> None:
        """Record the requests that all workers report as freed, or as loaded."""
        self._leaving.difference_update(sent)
        for request_id in received:
            if request_id in self._requests:
                self._requests[request_id].loading = False

    def finished(self, request: Any) -> bool:
        """End a request; return whether a later report frees its blocks."""
        tracked = self._requests.pop(request.request_id, None)
        self._due.pop(request.request_id, None)
        if tracked is None:
            return False
        later = tracked.busy and not tracked.loading
        if later:
            self._step.leaving.add(request.request_id)
            self._leaving.add(request.request_id)
        return later

    def forgotten(self) -> None:
        """Stop saving running requests, since the store was just cleared."""
        self._step.forgotten = True
        for tracked in self._requests.values():
            tracked.asked = None
            if tracked.ids or tracked.saved:
                tracked.nameless = True
                tracked.hashes = []

    # --- inside -----------------------------------------------------------------------

    def _tracked(self, request: Any) -> _Tracked:
        return self._requests.setdefault(request.request_id, _Tracked(request))

    def _answer(self, tracked: _Tracked) -> Future[int]:
        if tracked.asked is None:
            # vLLM computes the last token itself, since its output begins the answer.
            usable = (len(tracked.request.all_token_ids) - 1) // self._block_tokens
            hashes = self._hashes(tracked, usable)
            if not hashes:
                tracked.asked = Future()
                tracked.asked.set_result(0)
            else:
                tracked.asked = self._ask(hashes)
        return tracked.asked

    def _hashes(self, tracked: _Tracked, count: int) -> list[bytes]:
        """Return the hashes of a request's first blocks, as far as they are known.

        Only new ones are computed.
        """
        known = len(tracked.hashes)
        if count > known and not tracked.nameless:
            size = self._block_tokens
            tokens = tracked.request.all_token_ids[known * size : count * size]
            try:
                tracked.hashes += self._scheme.block_hashes(
                    list(tokens),
                    parent=tracked.hashes[-1] if known else None,
                    salt=b"" if known else identity_of(tracked.request),
                )
            except UsageError as exc:
                # vLLM lets some invalid token ids through.
                tracked.nameless = True
                logger.warning("request %s: %s", tracked.request.request_id, exc)
        return tracked.hashes[:count]

    def _scheduled(self, step: StoreStep, one: ScheduledRequest) -> None:
        """Add the blocks that one request completes in a step."""
        tracked = self._requests[one.id]
        size = self._block_tokens
        if one.new:
            tracked.ids = []
        first = not tracked.ids
        if first:
            # Blocks that could not be loaded are computed now, and saved again.
            tracked.saved = min(tracked.saved, one.computed // size)
        if one.tables is not None:
            tracked.ids += one.tables[0]
        # A pass may be scheduled before the tokens of the previous one are known.
        known = min(one.stop, len(tracked.request.all_token_ids))
        full = min(known // size, len(tracked.ids))
        if full <= tracked.saved:
            return
        hashes = self._hashes(tracked, full)
        full = len(hashes)
        if full <= tracked.saved:
            return
        # Some are written already: their last token became known after its pass was
        # scheduled. That is not so in the request's first pass: blocks from vLLM's
        # cache may be computed by another request in that same pass.
        written = tracked.saved if first else one.computed // size
        early = min(max(tracked.saved, written), full)
        for saves, part in (
            (step.written, slice(tracked.saved, early)),
            (step.saves, slice(early, full)),
        ):
            if part.start < part.stop:
                saves.append(NamedBlocks(one.id, hashes[part], tracked.ids[part]))
        tracked.saved = full
        tracked.busy = True
