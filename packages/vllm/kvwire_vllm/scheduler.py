"""The scheduler's side: decides which blocks to send, to fetch and to free, and when.

A prompt to send::

    its first step            Send, then Written for each step
    its request has ended     its blocks are held until they have drained
    preempted or aborted      the workers abort it
    without a transfer_id     once all is computed: Send with generations, and a ticket
                              in the answer; once drained, its blocks are withdrawn

A prompt to fetch::

    matched, its blocks allocated      Load; vLLM waits for it
    ended before it was scheduled      Load(declined)
    arrived with holes                 see `holes`

Nothing here waits or moves a byte. vLLM's requests are read, with two exceptions. The
flag ``do_remote_prefill`` is cleared once it has been handled, because a preempted
request comes back and must then compute the KV that it had fetched. The other exception
is the last token:

*The last token of a prompt.* Decode computes it itself, since it needs the output. If
decode reads only a part of the KV before it (a window, a chunk or a state), that part
must end before this token: a state that includes the token would apply it twice, and of
a window that ends with the token vLLM has freed the beginning. So with such groups,
prefill gets the prompt without its last token. What prefill then generates follows
another prompt, and **is never a part of an answer**.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvwire.errors import UsageError
from kvwire.kv.hashing import HashScheme
from kvwire.limits import KV_BLOCK_TOKENS_MAX, PRIORITY_MAX
from kvwire_vllm import tickets
from kvwire_vllm.caches import CacheShape
from kvwire_vllm.holes import HOLE, HoleFills
from kvwire_vllm.identity import identity_of, tokens_say_all
from kvwire_vllm.metadata import (
    NO_LIMITS,
    Blocks,
    ComputedTokens,
    LoadPrompt,
    ScheduledRequest,
    SendPrompt,
    TransferParams,
    WorkerStep,
    answer,
    scheduled_requests,
)
from kvwire_vllm.metrics import Observed, observe
from kvwire_vllm.references import References
from kvwire_vllm.tickets import TICKET_BLOCKS_MAX, OfferedBlocks
from kvwire_vllm.topology import check_ranks

logger: logging.Logger = logging.getLogger("kvwire.vllm")

# The priority of requests that set none; vLLM's priorities may be negative.
_USUAL_PRIORITY: Final = PRIORITY_MAX // 2
# For a prompt without hashes: ensures that no prompt with hashes can use its blocks.
_NAMELESS: Final[Mapping[str, Any]] = {"content": b"nameless"}
# The length of a traceparent in version 00 of W3C's Trace Context.
_TRACEPARENT_CHARS: Final = 55


@dataclass(slots=True)
class _Prompt:
    """The state of a prompt to send."""

    send: SendPrompt  # the metadata for the workers
    # The request's blocks, by vLLM's tables.
    tables: list[list[int]] = field(default_factory=list)
    # How many blocks of each table the workers know.
    named: dict[str, int] = field(default_factory=dict)
    written: int = 0  # the number of tokens computed after the scheduled steps
    begun: bool = False  # whether the workers know the prompt
    # Whether decode reads it by ticket once it is computed.
    offered: bool = False
    lost: bool = False  # whether it was preempted: nothing more is sent

    @property
    def whole(self) -> bool:
        """Whether all of it has been passed to the workers."""
        return self.begun and not self.lost and self.written >= self.send.tokens


class SchedulerSide:
    """The connector's part in the scheduler's process."""

    def __init__(
        self,
        shapes: Sequence[CacheShape],
        references: References,
        holes: HoleFills | None = None,
        *,
        limits: Mapping[str, int] = NO_LIMITS,
    ) -> None:
        self._limits = limits  # its configuration's limits of an answer's tokens
        self._references = references
        self._shapes = tuple(shapes)
        # The layers of one block table read the same blocks, so one shape represents
        # them.
        self._tables = {str(shape.table): shape for shape in shapes}
        self._partial = any(shape.partial for shape in shapes)
        # None: everything after the first missing block is computed.
        self._holes = holes
        self._addresses: tuple[str, ...] = ()
        self._prompts: dict[str, _Prompt] = {}
        self._loads: list[LoadPrompt] = []
        self._fenced: set[str] = set()  # preempted requests that have ended since
        self._observed: Observed = {}
        # For prompts that decode reads: the serials of the ranks' windows, the blocks
        # in references, and the blocks of each request with a valid reference.
        self._serials: tuple[bytes, ...] = ()
        self._offered = {name: OfferedBlocks() for name in self._tables}
        self._references_out: dict[str, Blocks] = {}
        self._withdrawn: Blocks = {}

    def set_addresses(
        self,
        addresses: dict[tuple[int, int], str],
        serials: Mapping[tuple[int, int], bytes] | None = None,
    ) -> None:
        """Record the addresses of this engine's ranks, by (pipeline stage, rank).

        Args:
            addresses: The addresses.
            serials: The serials of their windows; b"" for a rank without one.
        """
        self._addresses = tuple(addresses[rank] for rank in sorted(addresses))
        found = tuple((serials or {}).get(rank, b"") for rank in sorted(addresses))
        self._serials = found if all(found) else ()

    def begun(self, request: Any) -> None:
        """Remove the last token from a prompt to send, if decode needs that."""
        if not self._partial or not (wanted := self._wanted(request)).sends:
            return
        known = request.prompt_token_ids or ()
        if (
            wanted.loads
            or len(known) < 2
            or not tokens_say_all(request)
            or request.max_tokens != 1
            or getattr(request, "skip_reading_prefix_cache", False)
            # Its prompt grows, so its last token is one in the middle.
            or getattr(request, "resumable", False)
        ):
            # More tokens would free blocks and change states while decode reads them.
            logger.warning(
                "request %s: its KV is not sent; this model needs a prompt of 2 "
                "tokens or more, without embeddings, with max_tokens=1, that does not "
                "grow and is not from another engine",
                request.request_id,
            )
            request.kv_transfer_params["do_remote_decode"] = False
            observe(self._observed, "refused", 1)
            return
        request.prompt_token_ids = list(known[:-1])
        del request._all_token_ids[-1:]  # noqa: SLF001 - vLLM has no call for it
        request.num_prompt_tokens -= 1

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many more tokens another engine has or will have."""
        if self._holes is not None and (hole := _hole(request)):
            return self._holes.matched(request, hole, num_computed_tokens), False
        if not self._wanted(request).loads:
            return 0, False
        # A request for the prompt's probabilities needs the whole prompt computed here.
        # vLLM before 0.31 does not check that itself.
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        # Its blocks have no hashes, so the transfer would also overwrite cached blocks.
        if num_computed_tokens and not tokens_say_all(request):
            return 0, False
        count = self._fetched_tokens(request) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def allocated(
        self, request: Any, tables: Sequence[Sequence[int]], external: int
    ) -> None:
        """Record a request's blocks."""
        if self._holes is not None and (hole := _hole(request)):
            self._holes.allocated(request, hole, tables[0] if tables else (), external)
            return
        wanted = self._wanted(request)
        if wanted.sends and request.request_id not in self._prompts:
            self._prompts[request.request_id] = self._new_prompt(request, wanted)
        if wanted.loads:
            request.kv_transfer_params["do_remote_prefill"] = False
            load = self._new_load(request, wanted, tables, external)
            self._loads.append(load)
            if self._holes is not None:
                self._holes.watch(request, load)

    def step(self, output: Any) -> WorkerStep:
        """Return the metadata for the workers in a scheduled step."""
        preempted = getattr(output, "preempted_req_ids", None) or ()
        step = WorkerStep(fenced=self._fenced.union(preempted))
        self._fenced = set()
        for request_id in step.fenced:
            self._preempted(request_id)
        step.running = len(output.num_scheduled_tokens)
        step.idle = not step.running
        for one in scheduled_requests(output, self._prompts):
            self._scheduled(step, one)
        step.loads = self._loads
        self._loads = []
        step.withdrawn = self._withdrawn
        self._withdrawn = {}
        if self._holes is not None:
            self._holes.step(step, output)
        return step

    def drained(self, request_ids: Iterable[str]) -> None:
        """Withdraw the blocks of requests whose blocks vLLM is about to free."""
        for request_id in request_ids:
            self._withdraw(request_id)

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """End a request.

        Return whether its blocks are freed later, and the ``kv_transfer_params`` for
        the client.
        """
        if self._holes is not None:
            self._holes.finished(request)
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None and (wanted := self._wanted(request, over=True)).loads:
            # It was never scheduled; the engine that computed it must not wait for this
            # one.
            self._loads.append(self._declined(request, wanted))
        if prompt is None or not prompt.begun or prompt.lost:
            return False, None
        if not request.num_computed_tokens:
            # It was preempted since the last step, so its blocks already belong to
            # other requests.
            self._fenced.add(request.request_id)
            return False, None
        if not prompt.whole:
            return True, None
        stages = self._shapes[0].stage[1]
        send = prompt.send
        ticket = ""
        if send.generations:
            ticket = tickets.write(
                send.blocks, send.generations, send.content, self._serials
            )
        params = answer(
            send.transfer_id,
            self._addresses,
            stages,
            ticket=ticket,
            limits=self._limits,
        )
        return True, self._references.signed(params)

    def take_observed(self) -> Observed:
        """Return the metrics' observations since the last call."""
        observed = self._observed
        self._observed = {}
        return observed

    # --- inside -----------------------------------------------------------------------

    def _wanted(self, request: Any, *, over: bool = False) -> TransferParams:
        """Return a request's usable parameters, or None.

        Args:
            request: The request; may be passed repeatedly.
            over: Whether it ends now; if its parameters cannot be used, it is counted.
        """
        params = request.kv_transfer_params
        if not isinstance(params, dict):
            # None, or any value that a client sent by `vllm_xargs`.
            return TransferParams()
        if not (params.get("do_remote_decode") or params.get("do_remote_prefill")):
            return TransferParams()
        try:
            wanted = TransferParams.read(params)
            wanted.check()
            if wanted.remote:
                check_ranks(self._shapes, len(wanted.remote), wanted.stages)
                self._references.check(
                    wanted.transfer_id, wanted.remote, wanted.signature
                )
        except UsageError as exc:
            # A client's mistake costs that client a prefill here, and others nothing.
            logger.warning("request %s: %s", request.request_id, exc)
            if over:
                observe(self._observed, "refused", 1)
            return TransferParams()
        return wanted

    def _fetched_tokens(self, request: Any) -> int:
        """Return how many of a prompt's tokens another engine computes."""
        return max(0, len(request.prompt_token_ids or ()) - self._partial)

    def _new_prompt(self, request: Any, wanted: TransferParams) -> _Prompt:
        tokens = request.num_prompt_tokens
        send = SendPrompt(tokens=tokens, **self._moved(request, wanted, tokens))
        if send.transfer_id:
            return _Prompt(send)
        # Clients choose a part of a request's id, but nobody can guess this one. So
        # decode can ask only after prefill has answered.
        send.transfer_id = secrets.token_hex(16)
        blocks = sum(map(len, send.hashes.values()))
        offered = bool(self._serials) and 0 < blocks <= TICKET_BLOCKS_MAX
        return _Prompt(send, offered=offered)

    def _new_load(
        self,
        request: Any,
        wanted: TransferParams,
        tables: Sequence[Sequence[int]],
        external: int,
    ) -> LoadPrompt:
        if not external:
            return self._declined(request, wanted)
        tokens = self._fetched_tokens(request)
        load = LoadPrompt(
            computed=wanted.computed,
            ticketed=bool(wanted.ticket),
            **self._moved(request, wanted, tokens),
        )
        for name, shape in self._tables.items():
            needed = shape.needed(tokens)
            blocks = tables[shape.table][needed.start : needed.stop]
            load.blocks[name] = list(blocks)
            here = (tokens - external) // shape.block_tokens - needed.start
            load.cached[name] = min(max(0, here), len(needed))
        if wanted.ticket:
            try:
                found = tickets.read(
                    wanted.ticket, [*self._tables], load.content, len(wanted.remote)
                )
                load.there, load.generations, load.seals, load.sealed = found
            except UsageError as exc:
                logger.warning("request %s: %s", request.request_id, exc)
        return load

    def _moved(
        self, request: Any, wanted: TransferParams, tokens: int
    ) -> dict[str, Any]:
        """Return the metadata for moving a prompt's first tokens, for a worker."""
        try:
            names = self._names(request, tokens)
        except UsageError as exc:
            # vLLM lets some invalid token ids through.
            logger.warning(
                "request %s: moving its KV without block hashes: %s",
                request.request_id,
                exc,
            )
            names = _NAMELESS
        return {
            "request_id": request.request_id,
            "transfer_id": wanted.transfer_id,
            "listed": {
                name: shape.listed_tokens(tokens)
                for name, shape in self._tables.items()
            },
            "remote": wanted.remote,
            "stages": wanted.stages,
            "priority": _priority(request),
            "traceparent": _traceparent(request),
            **names,
        }

    def _declined(self, request: Any, wanted: TransferParams) -> LoadPrompt:
        request.kv_transfer_params["do_remote_prefill"] = False
        return LoadPrompt(
            request_id=request.request_id,
            transfer_id=wanted.transfer_id,
            remote=wanted.remote,
            stages=wanted.stages,
            declined=True,
            ticketed=bool(wanted.ticket),
        )

    def _names(self, request: Any, count: int) -> Mapping[str, Any]:
        """Return names for a prompt's first tokens and for the blocks that move.

        The tokens also have one name as a whole, for engines with other block sizes.
        """
        if not tokens_say_all(request):
            return _NAMELESS
        tokens = request.prompt_token_ids[:count]
        salt = identity_of(request)
        whole = _chain(min(count, KV_BLOCK_TOKENS_MAX), tokens, salt)[-1:]
        sizes = {
            shape.block_tokens for shape in self._tables.values() if not shape.state
        }
        chains = {size: _chain(size, tokens, salt) for size in sizes}
        hashes: dict[str, list[bytes]] = {}
        for name, shape in self._tables.items():
            needed = shape.needed(count)
            # A state covers all tokens, and its block may stand for more tokens than a
            # block of the chain.
            found = whole
            if not shape.state:
                found = chains[shape.block_tokens][needed.start : needed.stop]
            if len(self._tables) > 1:
                # The table's name distinguishes its blocks from another table's blocks
                # for the same tokens.
                table = name.encode()
                found = [hashlib.sha256(one + table).digest() for one in found]
            hashes[name] = found
        return {"content": whole[0], "hashes": hashes}

    def _scheduled(self, step: WorkerStep, one: ScheduledRequest) -> None:
        """Add one request of a step: its new blocks, and the tokens it computes."""
        prompt = self._prompts[one.id]
        if prompt.lost or prompt.whole:
            return
        if one.tables is not None:
            prompt.tables = prompt.tables or [[] for _ in one.tables]
            for table, new in zip(prompt.tables, one.tables, strict=True):
                table.extend(new)
        prompt.written = min(one.stop, prompt.send.tokens)
        whole = prompt.written >= prompt.send.tokens
        if prompt.offered and not whole:
            return
        new_blocks = self._new_blocks(prompt)
        if not prompt.begun:
            prompt.begun = True
            prompt.send.blocks = new_blocks
            new_blocks = {}
            step.sends.append(prompt.send)
            if prompt.offered:
                self._offer(prompt.send)
                return
        step.written.append(
            ComputedTokens(request_id=one.id, blocks=new_blocks, stop=prompt.written)
        )

    def _offer(self, send: SendPrompt) -> None:
        """Let decode read a prompt once this step has computed it."""
        send.generations = {
            name: self._offered[name].take(blocks)
            for name, blocks in send.blocks.items()
        }
        self._references_out[send.request_id] = send.blocks

    def _withdraw(self, request_id: str) -> None:
        """Invalidate a prompt's reference, if it has a valid one."""
        for name, blocks in self._references_out.pop(request_id, {}).items():
            free = self._offered[name].give_back(blocks)
            self._withdrawn.setdefault(name, []).extend(free)

    def _new_blocks(self, prompt: _Prompt) -> Blocks:
        """Return the blocks to move that the workers do not know yet."""
        found: Blocks = {}
        for name, shape in self._tables.items():
            needed = shape.needed(prompt.send.tokens)
            named = prompt.named.get(name, 0)
            table = prompt.tables[shape.table] if prompt.tables else []
            found[name] = table[needed.start + named : needed.stop]
            prompt.named[name] = named + len(found[name])
        return found

    def _preempted(self, request_id: str) -> None:
        self._withdraw(request_id)
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return
        prompt.lost = prompt.begun
        prompt.tables = []
        prompt.named = {}
        prompt.written = 0


def _hole(request: Any) -> str:
    """Return the key of the hole that a request computes, or ""."""
    params = request.kv_transfer_params
    found = params.get(HOLE) if isinstance(params, dict) else None
    return found if isinstance(found, str) else ""


def _priority(request: Any) -> int:
    """Return a request's priority in kvwire's order; in vLLM, the lowest goes first."""
    asked = getattr(request, "priority", 0)
    return min(PRIORITY_MAX, max(0, _USUAL_PRIORITY - asked))


def _traceparent(request: Any) -> str:
    """Return the span of a client's request; vLLM keeps it if it traces."""
    headers = getattr(request, "trace_headers", None) or {}
    return str(headers.get("traceparent", ""))[:_TRACEPARENT_CHARS]


def _chain(block_tokens: int, tokens: Sequence[int], salt: bytes) -> list[bytes]:
    """Return the hashes of a prompt's full blocks, and one for the remaining tokens."""
    scheme = HashScheme(block_tokens)
    hashes = scheme.block_hashes(tokens, salt=salt)
    rest = tokens[len(hashes) * block_tokens :]
    if rest:
        # No block is ever found by this hash, but it gives a short prompt a name.
        parent = hashes[-1] if hashes else scheme.root(salt)
        hashes.append(hashlib.sha256(parent + repr(list(rest)).encode()).digest())
    return hashes
