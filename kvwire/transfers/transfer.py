"""One end of a KV transfer: an id, peers, a lease, and exactly one outcome.

The two subclasses, :class:`~kvwire.Outgoing` and :class:`~kvwire.Incoming`, are the
objects that users hold. A transfer outlives the links that carry it. It has a *leg*
with each peer (:mod:`kvwire.transfers.leg`). When a leg's link is lost, the transfer
waits, within its lease, for another link, which carries the missing parts. Once the
transfer has ended and no link can touch its memory any more, it is ``drained`` and the
memory is free.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from kvwire.aio import (
    AsyncWith,
    LoopThread,
    absolute,
    running_loop,
    seconds_of,
    unusable,
)
from kvwire.backend import Payload
from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.driver.trace_ring import TraceRing
from kvwire.errors import (
    DeadlineExceeded,
    KVWireError,
    RequestCancelled,
    UsageError,
    WireCode,
    printable,
    shown,
    wrong_type,
)
from kvwire.kv.blocks import Bits, BlockLists, Blocks
from kvwire.kv.geometry import Geometry, Tokens, describe
from kvwire.kv.outcome import Outcome, join_outcomes, nothing_landed
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import PlanSide, TransferPlan
from kvwire.limits import NAME_CHARS_MAX, PRIORITY_MAX
from kvwire.proto.records import RequestRecord
from kvwire.transfers.leg import Flow, Leg
from kvwire.transfers.offer import (
    ENDPOINT_ID_BYTES,
    TransferOffer,
    new_trace,
    traceparent,
)
from kvwire.transfers.options import TransferOptions, transfer_key
from kvwire.transfers.ports import SharedServices
from kvwire.transfers.state import (
    OFF_LINK,
    OVER,
    TRANSFER_TRANSITIONS,
    LegState,
    TransferInput,
    TransferState,
)
from kvwire.transfers.timings import PhaseTimer
from kvwire.types import BufferId, text_of

# If there was no memory for an outcome, it is tried again after this time.
NO_MEMORY_S: Final = 0.1

logger: logging.Logger = logging.getLogger("kvwire.transfers")


class Progress(NamedTuple):
    """Counts the layers, over all groups, and payload bytes of a transfer.

    Attributes:
        layers: The number of its layers; 0 until its peer is known.
        marked: Layers that the producer has marked, as far as this side knows.
        landed: Layers whose blocks have all landed.
        nbytes: Payload bytes to move; 0 until its peer is known.
        landed_bytes: Payload bytes that have landed.
    """

    layers: int = 0
    marked: int = 0
    landed: int = 0
    nbytes: int = 0
    landed_bytes: int = 0


class NextMove(NamedTuple):
    """The next step that an open transfer waits for.

    Attributes:
        by: The responsible party: the peer or the way to it, this side's program, or
            this side's device.
        text: A description in words.
    """

    by: Literal["peer", "program", "device"]
    text: str


class TransferView(NamedTuple):
    """Shows an open transfer, for snapshots.

    Attributes:
        id: Its name.
        receives: Whether this side is its consumer.
        links: The connections that carry it, or were the last to carry it.
        age_s: Seconds since the call.
        next_move: The step that it waits for.
        progress: Its layers and bytes in total, marked and landed.
    """

    id: str | bytes | int
    receives: bool
    links: Sequence[ConnectionDriver]
    age_s: float
    next_move: NextMove
    progress: Progress


@unusable("await the transfer first: `outcome = await transfer`", result=Outcome)
class Transfer(AsyncWith):
    """The methods that both ends of a transfer share."""

    # Which end of the transfer this is.
    _receives = False
    _side = PlanSide.PRODUCER
    # Whether some of its blocks are not known yet.
    _growing = False
    # The number of peers.
    _peers = 1
    # The memory that links read or write: the listed blocks, or their shadow.
    _memory: PagedCache
    _memory_lists: BlockLists
    # This side's trace and the peer's, in TransferOffer's format; b"" without tracing.
    _trace = b""
    _peer_trace = b""
    _own_trace = False
    # A digest of the blocks' hashes or content name; b"" if the caller gave neither.
    _hashes = b""
    # The waiters for the outcome; and an event for draining, if anybody waits for it.
    _waiters: tuple[asyncio.Future[None], ...] = ()
    _free: asyncio.Event | None = None
    _is_drained = False
    # None while the outcome is not known.
    _outcome: Outcome | None = None
    # The reason for its end.
    _cause: KVWireError | None = None
    # Returns the reason why its peer was not asked yet, if the peer is not connected.
    _unasked: Callable[[], str] | None = None
    # The task that connects to the peer, until the peer was asked.
    _asking: asyncio.Task[None] | None = None
    # The number of buffers and threads that keep it from being drained.
    _busy = 0
    _lease: asyncio.TimerHandle | None = None
    # When the lease ends; None if the lease will start again in full.
    _lease_until: float | None = None
    # Why the peer was not reached again, as far as that is known.
    _missed: str = ""
    _expiry: asyncio.TimerHandle | None = None
    # Whether the last check for the log found it open; and whether it was logged.
    _seen_open = False
    _named_in_log = False

    def __init__(
        self,
        services: SharedServices,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        options: TransferOptions,
    ) -> None:
        priority = options.get("priority", 0)
        lease_s = options.get("lease_s")
        if not isinstance(cache, PagedCache):
            raise wrong_type("cache", cache, "a kvwire.PagedCache")
        if type(priority) is not int or not 0 <= priority <= PRIORITY_MAX:
            raise UsageError(
                f"priority={priority!r}: pass 0 to {PRIORITY_MAX}; a higher priority "
                "goes first"
            )
        self._lease_s: float = services.config.lease_s
        if lease_s is not None:
            self._lease_s = seconds_of("lease_s", lease_s)
        self._id = id
        # One communicator may have a producer and a consumer with the same name.
        self._key: bytes = transfer_key(id)
        self._slot_key: tuple[bytes, bool] = self._key, not self._receives
        self._cache = cache
        self._services: SharedServices = services
        self._thread: LoopThread = services.thread
        self._loop: asyncio.AbstractEventLoop = services.loop
        # Lends the cache's memory to links, until they have drained it.
        self._lend: Callable[[Payload], BufferId] = services.buffers.lend
        self._priority = priority
        self._tokens: Tokens = options.get("tokens")
        self._lists: BlockLists = cache.block_lists(blocks)
        if self._growing:
            self._lists = self._padded(self._lists)
        self._memory = cache
        self._memory_lists = self._lists
        codec = options.get("codec")
        if codec is not None:
            self._memory, self._memory_lists = self._coded(codec)
        self._geometry: Geometry = describe(
            self._memory, self._memory_lists, self._tokens
        )
        if self._memory.device is not None:
            # A broken device raises here, before anything is promised to the peer.
            services.devices.copy_engine(self._memory.device)
        self._on_drained = options.get("free")
        if self._on_drained is not None and not callable(self._on_drained):
            raise wrong_type("free", self._on_drained, "a callable without arguments")
        deadline = options.get("deadline")
        self._deadline = None if deadline is None else absolute(deadline)
        self._phases: PhaseTimer = PhaseTimer()
        self._endpoint_id: bytes = os.urandom(ENDPOINT_ID_BYTES)
        self._ring: TraceRing | None = services.ring
        if self._ring is not None or services.watchers.traced:
            self._trace = services.watchers.trace_context()
            self._own_trace = bool(self._trace)
            self._trace = self._trace or new_trace()
        self._legs: list[Leg] = []
        self._state: TransferState = TransferState.NEW

    # --- what users call --------------------------------------------------------------

    def __repr__(self) -> str:
        peers = [shown(leg.link.peer.name) for leg in self._legs]
        text = (
            f"<{type(self).__name__} {self._id!r} with {', '.join(peers) or 'nobody'}"
        )
        if self._outcome is not None:
            return f"{text}, over: {self._outcome.state}>"
        progress = self._progress
        layers = f"{progress.landed} of {progress.layers} layers landed"
        return (
            f"{text} for {self._phases.age_s:.1f} s, {layers}: {self._next_move.text}>"
        )

    def __await__(self) -> Generator[Any, Any, Outcome]:
        if self._outcome is None:
            self._thread.check(f"await {type(self).__name__}")
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters += (waiter,)
            try:
                yield from waiter
            finally:
                if self._outcome is None:
                    self._waiters = tuple(w for w in self._waiters if w is not waiter)
            assert self._outcome is not None
        elif not self._outcome.complete:
            yield  # one turn of the loop: see kvwire.aio
        return self._outcome

    @property
    def id(self) -> str | bytes | int:
        """Return the id that both applications use for the transfer."""
        return self._id

    @property
    def traceparent(self) -> str:
        """Return its trace as a W3C ``traceparent`` header; "" without tracing.

        The peer's trace is adopted as soon as it is known, so both ends are in one
        trace, unless each end began in its own trace.
        """
        return traceparent(self._peer_trace or self._trace)

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return self._outcome is not None

    @property
    def outcome(self) -> Outcome | None:
        """Return the outcome, or None while it is not known."""
        return self._outcome

    @property
    def is_drained(self) -> bool:
        """Whether kvwire can no longer touch the transfer's blocks."""
        return self._is_drained

    async def drained(self) -> None:
        """Wait until kvwire can no longer touch the transfer's blocks.

        The blocks may be reused only after that. There is no deadline, because a
        timeout could only guess whether the memory is free.

        Cancel safety: safe, it only watches.
        """
        if running_loop() is not self._thread.loop:
            self._thread.check(f"{type(self).__name__}.drained")
        if not self._is_drained:
            if self._free is None:
                self._free = asyncio.Event()
            await self._free.wait()

    def abort(self, reason: str = "aborted") -> None:
        """End the transfer, and notify the peer. Memory is free once drained."""
        if self._outcome is None:
            self._thread.check(f"{type(self).__name__}.abort")
            self._stop(RequestCancelled(printable(str(reason))), WireCode.CANCELLED)

    # --- what differs between the two ends --------------------------------------------

    def _offer(self, peer_id: bytes = b"", plan: bytes = b"") -> TransferOffer:
        """Return this side's description, for OPEN and AGREE.

        Args:
            peer_id: The id of the peer's end, if the two have met.
            plan: The digest of this side's plan, in an answer.
        """
        return TransferOffer(
            geometry=self._geometry.packed,
            endpoint_id=self._endpoint_id,
            peer_id=peer_id,
            hashes=self._hashes,
            plan=plan,
            trace=self._trace,
        )

    def _padded(self, lists: BlockLists) -> BlockLists:
        """Return the lists of a growing transfer, with room for all its tokens."""
        raise NotImplementedError

    def _coded(self, codec: object) -> tuple[PagedCache, BlockLists]:
        """Return the cache that links touch, and the block lists in it."""
        raise NotImplementedError

    def _held_by(self, offer: TransferOffer, peer: Geometry) -> Mapping[str, Bits]:
        """Return the positions that the consumer has, by group."""
        raise NotImplementedError

    def _flow(self, leg: Leg) -> Flow:
        """Return a flow for a leg's segments on the link that carries it now."""
        raise NotImplementedError

    def _check_plan(self, plan: TransferPlan) -> None:
        """Refuse a plan that does not fit the plans of other legs."""

    def _met(self, leg: Leg, offer: TransferOffer) -> None:
        """Handle the peer's offer after a leg has got its plan."""
        raise NotImplementedError

    def _leg_over(self, leg: Leg, error: KVWireError | None) -> None:
        """Handle the end of a leg while the transfer is open: served, or failed."""
        raise NotImplementedError

    def _stop_jobs(self) -> int:
        """Start no more work on threads; return 1 if one still reads the blocks."""
        return 0

    @property
    def _next_move(self) -> NextMove:
        """Return an open transfer's reason for waiting, for logs and outcomes."""
        raise NotImplementedError

    @property
    def _progress(self) -> Progress:
        """Count the marked and landed parts; for snapshots, not for hot loops."""
        raise NotImplementedError

    @property
    def _finishing(self) -> bool:
        """Whether only the delivery of committed parts is left on this side."""
        return False

    # --- legs -------------------------------------------------------------------------

    def _ask(self, link: ConnectionDriver) -> None:
        """Send or repeat the request to a link's peer.

        Raises:
            UsageError: The peer has too many transfers to answer already.
            ConnectionClosed: The connection is closing or closed.
        """
        if self._state in OVER:
            return
        waiting = self._in(LegState.WAITING) if self._legs else ()
        leg = waiting[0] if waiting else self._new_leg(link, asks=True)
        try:
            leg.ask(link)
        except KVWireError:
            if not waiting:
                self._legs.remove(leg)
            raise
        self._watch_lease()

    def _matched(
        self, link: ConnectionDriver, core: RequestRecord, offer: TransferOffer
    ) -> None:
        """Answer a peer whose question the registry has accepted."""
        leg = self._known(link, offer) or self._new_leg(link, asks=False)
        leg.answer(link, core, offer)
        self._watch_lease()

    def _known(self, link: ConnectionDriver, offer: TransferOffer) -> Leg | None:
        """Return the leg that a peer asks to resume, or None."""
        for leg in self._legs:
            same_peer = leg.origin == link.peer.origin
            if same_peer and leg.peer_id == offer.endpoint_id:
                return leg
        return None

    def _new_leg(self, link: ConnectionDriver, *, asks: bool) -> Leg:
        phases = self._phases
        if self._peers > 1:
            phases = PhaseTimer(phases.created)
        elif asks and not self._receives:
            phases.phase = "memory_wait"
        leg = Leg(self, link, phases, asks=asks)
        self._legs.append(leg)  # bounded by `_peers`
        # A new peer counts as progress, so a peer that is still missing gets a whole
        # lease.
        self._lease_until = None
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        return leg

    def _in(self, *states: LegState) -> list[Leg]:
        """Return the legs in one of these states."""
        return [leg for leg in self._legs if leg.state in states]

    def _release(self, leg: Leg) -> None:
        """Release a leg's memory, and count it as busy until it drains."""
        buffers = self._services.buffers
        released = leg.release()
        if not released:
            return
        buffers.collect()
        for buffer in buffers.undrained(released):
            self._busy += 1
            buffers.on_drained(buffer, self._one_free)

    # --- time -------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start: notify observers and arm the deadline."""
        self._state = TRANSFER_TRANSITIONS[self._state, TransferInput.BEGIN]
        watchers = self._services.watchers
        if watchers.watchers:
            watchers.begun(self)
        if self._ring is not None:
            side = "receive" if self._receives else "send"
            self._note("begin", text_of(self._id)[:NAME_CHARS_MAX], side)
        if self._cause is not None:  # the request itself has ended it
            self._try_to_end()
        elif self._deadline is not None:
            self._expiry = self._loop.call_at(self._deadline, self._expired)

    def _watch_lease(self) -> None:
        """Run the lease while a peer is missing, and only then.

        If a peer returns and is lost again without progress, only the rest of the lease
        remains, so a link that keeps breaking does not renew it.
        """
        over = self._outcome is not None
        here = [] if over else [leg for leg in self._legs if leg.state not in OFF_LINK]
        if over or len(here) >= self._peers:
            if self._lease is not None:
                self._lease.cancel()
                self._lease = None
        elif self._lease is None:
            if self._lease_until is None:
                self._lease_until = self._loop.time() + self._lease_s
            self._lease = self._loop.call_at(self._lease_until, self._lease_over)

    def _renew_lease(self) -> None:
        """Restart the lease, because of progress or at the caller's request."""
        self._lease_until = None
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
            self._watch_lease()

    def _expired(self) -> None:
        error = DeadlineExceeded(
            f"the transfer's deadline passed: {self._next_move.text}"
        )
        self._stop(error, WireCode.DEADLINE)

    def _lease_over(self) -> None:
        self._lease = None
        error = DeadlineExceeded(
            f"the lease of {self._lease_s:g} s ended while a peer was missing: "
            f"{self._missed or self._next_move.text}"
        )
        self._stop(error, WireCode.DEADLINE)

    # --- the end ----------------------------------------------------------------------

    def _stop(self, error: KVWireError, code: WireCode) -> None:
        """End every leg with an error, and the transfer, unless it is ending."""
        if self._state not in OVER:
            for leg in list(self._legs):
                leg.refuse(error, code)
            self._end(error)

    def _end(self, cause: KVWireError) -> None:
        """End the transfer, once; ``cause`` is the reason for missing parts.

        If there is no memory for an outcome, making it is tried again a moment later;
        otherwise the transfer would never end.
        """
        if self._state is TransferState.NEW:
            self._state = TRANSFER_TRANSITIONS[self._state, TransferInput.END]
            self._cause = cause
        elif self._state is TransferState.OPEN:
            self._state = TRANSFER_TRANSITIONS[self._state, TransferInput.END]
            self._cause = cause
            self._try_to_end()

    def _try_to_end(self) -> None:
        if self._state is not TransferState.ENDING:
            return  # it has ended while this was postponed
        try:
            self._record()
        except MemoryError:
            if self._outcome is not None:
                raise
            logger.error(
                "transfer %r: could not allocate memory for its outcome", self._id
            )
            self._loop.call_later(NO_MEMORY_S, self._try_to_end)

    def _record(self) -> None:
        """Make and record the outcome; memory drains with the legs' buffers.

        Before: no leg starts anything new for this transfer. After: every waiter has
        the outcome, the name is free, and each buffer that a link may still touch
        counts in ``_busy``, which only its draining decrements.
        """
        cause = self._cause
        services = self._services
        assert cause is not None
        reason = str(cause)
        outcomes = [leg.outcome(self, reason) for leg in self._legs if leg.planned]
        if len(outcomes) < self._peers:  # peers that never came received nothing
            outcomes.append(
                nothing_landed(
                    self._cache,
                    self._lists,
                    reason,
                    tokens=dict(outcomes[0].tokens) if outcomes else self._tokens,
                    timings=self._phases.timings(),
                )
            )
        outcome = join_outcomes(outcomes)
        services.registry.over(self, cause)
        self._state = TRANSFER_TRANSITIONS[self._state, TransferInput.RECORD]
        self._outcome = outcome
        services.counters.transfer_ended(outcome, received=self._receives)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self._lease is not None:
            self._watch_lease()
        if self._asking is not None:
            self._asking.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        self._busy += 1 + self._stop_jobs()
        for leg in self._legs:
            self._release(leg)
        self._one_free()
        if services.watchers.watchers:
            services.watchers.ended(self, outcome, [leg.link for leg in self._legs])
        if self._ring is not None:
            self._note("end", outcome.state, outcome.nbytes, self._trace[:16].hex())

    def _one_free(self) -> None:
        self._busy -= 1
        if not self._busy and self._state is TransferState.ENDED:
            self._state = TRANSFER_TRANSITIONS[self._state, TransferInput.DRAIN]
            if self._on_drained is None:
                self._has_drained()
            else:
                # In a separate turn, because the callback may begin another transfer.
                self._loop.call_soon(self._has_drained)

    def _has_drained(self) -> None:
        self._is_drained = True
        if self._free is not None:
            self._free.set()
        if self._on_drained is not None:
            self._on_drained()

    @property
    def _given_up(self) -> KVWireError | None:
        """Return the error of a transfer that this side ended, or None."""
        return self._cause if isinstance(self._cause, RequestCancelled) else None

    def _view(self) -> TransferView:
        links = [leg.link for leg in self._legs]
        return TransferView(
            self._id,
            self._receives,
            links,
            self._phases.age_s,
            self._next_move,
            self._progress,
        )

    # --- traces -----------------------------------------------------------------------

    def _note(self, what: str, *more: str | int) -> None:
        """Add an event to the trace ring; call it only if there is one."""
        assert self._ring is not None
        self._ring.note(what, self._endpoint_id.hex(), *more)

    def _note_peer(self, link: ConnectionDriver, trace: bytes) -> None:
        """Record the peer; its trace replaces a trace that this side generated."""
        self._peer_trace = trace or self._peer_trace
        if self._trace and trace and not self._own_trace:
            self._trace = trace
        if self._ring is not None:
            self._note("met", link.peer.name[:NAME_CHARS_MAX])
