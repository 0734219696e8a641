"""Holes: runs of missing blocks that are followed by blocks that have arrived.

KV after a hole is valid, since prefill computed it with the whole prompt before it. But
vLLM has only one number of computed tokens per request. It truncates that number at the
first missing block, computes everything after it, and calls a connector only while the
number is 0. So no request can compute a hole and then skip the blocks that have
arrived.

But another request can: one that ends where the hole does. So this engine requests from
its own HTTP server the beginning of the prompt, up to the end of a hole, and one
token::

    arrived with holes --> the request keeps waiting for KV, and holds all its blocks
      its next hole    --> POST: the tokens up to the end of the hole
        matched        --> the blocks before the hole count as computed
        allocated      --> lent: those blocks are copied, before the step computes
        computed       --> filled: the hole's blocks are copied back, after the step
      no hole is left, or nobody computes one --> settled: the request uses what it has

The step that computes the hole makes both copies, between blocks that both requests
still hold, so nothing is kept for a later step. If the request ends, the request for
its hole is cancelled. If that one ends, or does not get to compute, the original
request continues at once, and vLLM computes everything after the first block that is
still missing.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from kvwire_vllm.identity import identity_of, tokens_say_all
from kvwire_vllm.metadata import (
    BlockCopy,
    LoadPrompt,
    WorkerStep,
    scheduled_requests,
)
from kvwire_vllm.own_server import OwnRequest, OwnServer

logger: logging.Logger = logging.getLogger("kvwire.vllm")

HOLE: Final = "kvwire_hole"
"""The key in ``kv_transfer_params`` that marks a request for a hole."""
# One more request costs about as much GPU time as this many tokens. If fewer arrived
# between two holes, or after the last one, they are computed again.
WORTH_TOKENS: Final = 256
# Meanwhile the original request holds its blocks, and those may be the ones that the
# request for its hole needs.
_WAIT_S: Final = 2.0
# Holes that are computed at once; each needs blocks for the prompt up to its end.
_AT_ONCE: Final = 8

Reports = dict[str, tuple[int, list[int]]]
"""By request: the number of ranks that report its arrival, and its missing blocks."""


@dataclass(slots=True, eq=False)
class _Filler:
    """A request for the tokens up to the end of a hole."""

    prompt: _Prompt
    hole: range  # the hole, as positions of blocks
    sent: OwnRequest
    until: float  # the time by which its first step must have come
    request_id: str = ""  # vLLM's name for it; "" until it is scheduled
    blocks: list[int] = field(default_factory=list)
    ended: bool = False


@dataclass(slots=True, eq=False)
class _Prompt:
    """A request whose KV comes from another engine."""

    request: Any
    blocks: list[int]
    ranks: int = 0  # ranks that have reported
    missing: set[int] = field(default_factory=set)
    holes: deque[range] = field(default_factory=deque)
    filler: str = ""  # the key of the request for its current hole


class HoleFills:
    """Fills prompts' holes by requests to this engine; used by the scheduler's side.

    Args:
        server: This engine's HTTP server.
        table: The name of the engine's only block table.
        block_tokens: Tokens per block.
        ranks: The number of workers.
        wait_s: How long a request for a hole may take to get its first step.
    """

    def __init__(
        self,
        server: OwnServer,
        *,
        table: str,
        block_tokens: int,
        ranks: int,
        wait_s: float = _WAIT_S,
    ) -> None:
        self.wait_s: float = wait_s
        self._server = server
        self._table = table
        self._block_tokens = block_tokens
        self._gap = -(-WORTH_TOKENS // block_tokens)
        self._ranks = ranks
        self._prompts: dict[str, _Prompt] = {}
        # Requests that have arrived with missing blocks; a few at most.
        self._waiting: dict[str, _Prompt] = {}
        self._fillers: dict[str, _Filler] = {}  # by the key in their parameters
        self._scheduled: dict[str, _Filler] = {}  # by vLLM's name
        self._lent: list[BlockCopy] = []

    def watch(self, request: Any, load: LoadPrompt) -> None:
        """Request the workers' reports of the prompt's missing blocks."""
        if load.declined or self._server.useless or not tokens_say_all(request):
            return
        if getattr(request, "mm_features", None):
            return  # tokens alone do not identify the prompt
        load.fillable = True
        blocks = load.blocks[self._table]
        self._prompts[request.request_id] = _Prompt(request, blocks)

    def arrived(self, reports: Mapping[str, tuple[int, Sequence[int]]]) -> None:
        """Handle the workers' reports of arrivals."""
        for request_id, (ranks, missing) in reports.items():
            prompt = self._prompts.get(request_id)
            if prompt is None:
                continue  # it has ended, and the workers know or will soon know
            prompt.ranks += ranks
            prompt.missing.update(missing)
            if prompt.ranks < self._ranks:
                continue
            if not prompt.missing:
                del self._prompts[request_id]
                continue
            places = [
                place
                for place, block in enumerate(prompt.blocks)
                if block in prompt.missing
            ]
            prompt.holes.extend(holes_in(places, len(prompt.blocks), self._gap))
            self._waiting[request_id] = prompt

    def received(self, request_ids: Iterable[str]) -> None:
        """Drop requests that no longer wait for KV."""
        for request_id in request_ids:
            self._prompts.pop(request_id, None)

    def matched(self, request: Any, key: str, computed: int) -> int:
        """Return how many further tokens before its hole are present."""
        filler = self._filler(request, key)
        if filler is None or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        return max(0, filler.hole.start * self._block_tokens - computed)

    def allocated(
        self, request: Any, key: str, blocks: Sequence[int], external: int
    ) -> None:
        """Lend a request the blocks before its hole."""
        filler = self._filler(request, key)
        if filler is None:
            return
        filler.request_id = request.request_id
        self._scheduled[request.request_id] = filler
        stop = filler.hole.start
        start = stop - external // self._block_tokens
        if start < stop:
            source = filler.prompt.blocks[start:stop]
            self._lent.append(BlockCopy(source, list(blocks[start:stop])))

    def step(self, step: WorkerStep, output: Any) -> None:
        """Add the lent, filled and settled blocks to a step."""
        step.lent = self._lent
        self._lent = []
        for request_id in step.fenced:
            if (preempted := self._scheduled.get(request_id)) is not None:
                preempted.blocks = []
        for one in scheduled_requests(output, self._scheduled):
            filler = self._scheduled[one.id]
            if one.tables is not None:
                filler.blocks.extend(one.tables[0])
            filler.until = monotonic() + self.wait_s
            if one.stop >= filler.hole.stop * self._block_tokens:
                self._fill(step, filler)
        for request_id, prompt in list(self._waiting.items()):
            filler_now = self._fillers.get(prompt.filler)
            if filler_now is None and self._next(prompt):
                continue
            if filler_now is None or self._lost(filler_now):
                step.settled[request_id] = sorted(prompt.missing)
                self._end(request_id)

    def finished(self, request: Any) -> None:
        """Remove a request from all records of holes."""
        self._end(request.request_id)
        filler = self._scheduled.pop(request.request_id, None)
        if filler is not None:
            filler.ended = True

    def close(self) -> None:
        """Cancel the running requests."""
        for filler in self._fillers.values():
            filler.sent.cancel()

    def _filler(self, request: Any, key: str) -> _Filler | None:
        """Return the hole that a request fills, if its tokens match."""
        filler = self._fillers.get(key)
        if filler is None or filler.request_id not in ("", request.request_id):
            return None
        whole = filler.prompt.request
        stop = filler.hole.stop * self._block_tokens
        same = list(request.prompt_token_ids or ()) == whole.prompt_token_ids[:stop]
        return filler if same and identity_of(request) == identity_of(whole) else None

    def _next(self, prompt: _Prompt) -> bool:
        """Request a prompt's next hole; return False if there is none."""
        if not prompt.holes or len(self._fillers) >= _AT_ONCE:
            return False
        hole = prompt.holes.popleft()
        key = secrets.token_hex(16)
        request = prompt.request
        body = {
            "prompt": list(request.prompt_token_ids[: hole.stop * self._block_tokens]),
            "max_tokens": 1,
            "priority": getattr(request, "priority", 0),
            "kv_transfer_params": {HOLE: key},
        }
        if (adapter := getattr(request, "lora_request", None)) is not None:
            body["model"] = adapter.lora_name
        if salt := getattr(request, "cache_salt", None):
            body["cache_salt"] = salt
        sent = self._server.post(body)
        self._fillers[key] = _Filler(prompt, hole, sent, monotonic() + self.wait_s)
        prompt.filler = key
        return True

    def _fill(self, step: WorkerStep, filler: _Filler) -> None:
        part = slice(filler.hole.start, filler.hole.stop)
        prompt = filler.prompt
        blocks = prompt.blocks[part]
        step.filled.append(BlockCopy(filler.blocks[part], blocks))
        prompt.missing.difference_update(blocks)
        self._scheduled.pop(filler.request_id)
        self._fillers.pop(prompt.filler)
        logger.info(
            "request %s: computed the hole of blocks %d to %d of %d by itself",
            prompt.request.request_id,
            filler.hole.start,
            filler.hole.stop - 1,
            len(prompt.blocks),
        )

    def _lost(self, filler: _Filler) -> bool:
        """Return whether the hole will not be computed."""
        if filler.sent.answered and not filler.request_id:
            # If several engines share one URL, another one may compute the prompt
            # instead.
            self._server.give_up("another engine has answered")
        return filler.ended or filler.sent.over or monotonic() > filler.until

    def _end(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)
        prompt = self._waiting.pop(request_id, None)
        filler = self._fillers.pop(prompt.filler, None) if prompt else None
        if filler is not None:
            filler.sent.cancel()
            self._scheduled.pop(filler.request_id, None)


def holes_in(missing: Iterable[int], count: int, gap: int) -> list[range]:
    """Return the runs of missing blocks that are followed by landed blocks.

    Args:
        missing: Positions of the missing blocks, ascending.
        count: The number of blocks.
        gap: The fewest landed blocks that separate two runs, or that make a last run
            a hole. With fewer in between, two runs become one; with fewer after it, a
            last run is left out.
    """
    runs: list[range] = []
    for place in missing:
        if runs and place - runs[-1].stop < gap:
            runs[-1] = range(runs[-1].start, place + 1)
        else:
            runs.append(range(place, place + 1))
    if runs and count - runs[-1].stop < gap:
        runs.pop()
    return runs


def added(first: Reports, second: Reports) -> Reports:
    """Join the reports of two workers."""
    joined = dict(first)
    for request_id, (ranks, missing) in second.items():
        others, known = joined.get(request_id, (0, []))
        joined[request_id] = ranks + others, [*known, *missing]
    return joined
