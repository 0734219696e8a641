"""What the two ends of a KV transfer have in common: an id, a lease, an outcome.

A transfer outlives the connection it runs on. Each link it runs on is an *attempt*:
when one is lost the transfer waits, within its lease, for the next, which goes on with
what has not landed. It ends exactly once, with an outcome. Its memory is free when it
has ended and no attempt can touch it any more: that is ``drained``.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvwire.aio import LoopThread, absolute, seconds_of
from kvwire.backend import Payload
from kvwire.driver.trace_ring import TraceRing
from kvwire.errors import (
    ConnectionLost,
    DeadlineExceeded,
    KVWireError,
    PeerUnresponsive,
    RequestCancelled,
    UsageError,
    WireCode,
    wrong_type,
)
from kvwire.kv.blocks import Bits, BlockLists, Blocks
from kvwire.kv.geometry import Geometry, Tokens, describe
from kvwire.kv.outcome import Outcome, nothing_landed
from kvwire.kv.paged import PagedCache
from kvwire.kv.plan import Segment, TransferPlan
from kvwire.limits import (
    NAME_CHARS_MAX,
    NO_MEMORY_S,
    PRIORITY_MAX,
    TRANSFER_ID_BYTES_MAX,
)
from kvwire.proto.events import (
    SegmentLanded,
    SegmentMarked,
    SegmentsAcknowledged,
    TransferSettled,
)
from kvwire.proto.records import RequestRecord
from kvwire.transfers.description import (
    ENDPOINT_ID_BYTES,
    TransferOffer,
    new_trace,
)
from kvwire.transfers.options import TransferOptions
from kvwire.transfers.ports import ConnectionPort, TransferServices
from kvwire.transfers.state import (
    ATTEMPT_TRANSITIONS,
    TRANSFER_TRANSITIONS,
    AttemptInput,
    AttemptState,
    TransferInput,
    TransferState,
)
from kvwire.transfers.timings import PhaseTimer
from kvwire.types import BufferId, text_of, whole

if TYPE_CHECKING:
    from kvwire.transfers.matching import TransferRegistry
    from kvwire.transfers.ports import ObserverPort

logger: logging.Logger = logging.getLogger("kvwire.transfers")

# A peer that has nothing else to say says so once in an interval.
SILENT_INTERVALS = 1.5
DAMAGED = "its bytes arrived damaged"
UNMARKED = "it was not marked ready by the producer"

TransferEvent = SegmentMarked | SegmentLanded | SegmentsAcknowledged | TransferSettled


def transfer_key(id: str | bytes | int) -> bytes:
    """Return the bytes that name a transfer on the wire; 1, "1", b"1" are three names.

    Raises:
        UsageError: Another type, or too long.
    """
    if isinstance(id, str):
        try:
            key = b"s" + id.encode()
        except UnicodeEncodeError as exc:
            raise UsageError(f"transfer id {id!r}: {exc}") from None
    elif isinstance(id, bytes):
        key = b"b" + id
    elif (number := whole(id)) is not None:
        key = b"i%d" % number
    else:
        raise UsageError(f"transfer id {id!r}: pass a str, bytes or int")
    if not 1 < len(key) <= TRANSFER_ID_BYTES_MAX:
        raise UsageError(f"a transfer id of {len(key) - 1} bytes; 1 to 255 are allowed")
    return key


class Answer(enum.Enum):
    """Answers a peer that asks for a transfer."""

    YES = "yes"
    NO = "no"
    LATER = "later"
    """Once the link that the peer has lost is known to be lost here as well, or once
    there is memory for the outcome of what has ended."""


class UnnotifiedPeers(NamedTuple):
    """Counts and names the peers that may still ask for a transfer that is over.

    Attributes:
        unseen: How many never came.
        known: The ends of those who came, and may not have heard how it ended.
    """

    unseen: int
    known: frozenset[bytes]


class Progress(NamedTuple):
    """Counts the layers, over all groups, and payload bytes of a transfer.

    Attributes:
        layers: How many there are; 0 until its peer is known.
        marked: Those that the producer has marked, as far as this side knows.
        landed: Those of which every block has landed.
        nbytes: Payload bytes that move; 0 until its peer is known.
        landed_bytes: Those that have landed.
    """

    layers: int = 0
    marked: int = 0
    landed: int = 0
    nbytes: int = 0
    landed_bytes: int = 0


class Attempt:
    """Runs a transfer with one peer, on the connection that carries it now.

    Attributes:
        connection: The last one that has carried it.
        origin: The peer's.
        asks: This side asks for it, and asks again after a lost link.
        state: See kvwire.transfers.state.
        core: Its request on the connection; None where no link can touch its memory.
    """

    def __init__(
        self,
        connection: ConnectionPort,
        *,
        asks: bool,
        state: AttemptState = AttemptState.ASKED,
    ) -> None:
        self.connection: ConnectionPort = connection
        self.origin: bytes = connection.peer.origin
        self.asks = asks
        self.state: AttemptState = state
        self.core: RequestRecord | None = None
        # The peer's end of the transfer, over all its links.
        self.peer_id: bytes = b""

    def ask(self, connection: ConnectionPort, end: KVTransfer) -> None:
        """Ask the peer of a connection for a transfer of which this side has an end.

        Raises:
            UsageError: The peer has too many transfers to answer already.
            ConnectionClosed: The connection is closing or closed.
        """
        self.connection = connection
        try:
            connection.start_transfer(
                self,
                key=end.key,
                priority=end.priority,
                description=end.description(self.peer_id).encode(),
                pull=end.receives,
            )
        except KVWireError:
            self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.LOSE]
            self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.RELEASE]
            raise

    def agreed(self, description: TransferOffer) -> None:
        """Take in the peer's answer to our OPEN."""
        raise NotImplementedError

    def event(self, event: TransferEvent) -> None:
        """Take in an event of the attempt's segments."""
        raise NotImplementedError

    def ended(self, error: KVWireError | None) -> None:
        """Take in the end of the attempt's request; called exactly once."""
        raise NotImplementedError

    def refuse(self, error: KVWireError, code: WireCode) -> None:
        """End the attempt and tell the peer; does nothing if its request is over."""
        if self.core is not None and not self.core.over:
            self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.REFUSE]
            self.connection.refuse(self.core, error, code)
            self.connection.run()

    def release(self) -> list[BufferId]:
        """Retire the memory of the attempt's segments; return the buffers.

        The attempt leaves its connection if its request is over: what may still touch
        its memory has holds on it, and a lost attempt may be resumed from here on.
        """
        core = self.core
        if core is None:
            return []
        if not core.over:
            return self.connection.transfers.retire(core)
        core.context = self.core = None
        if self.state is AttemptState.LOST:
            self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.RELEASE]
        return self.connection.transfers.forget(core)


class KVTransfer:
    """Holds one end of a KV transfer; belongs to the loop of its communicator."""

    # Which end it is.
    receives: bool = False
    # Not all of its blocks are known yet.
    growing: bool = False
    # What links read or write: the listed blocks, unless they are encoded.
    memory: PagedCache
    memory_lists: BlockLists
    # Its trace and the peer's, as TransferOffer has them; b"" where nobody traces.
    trace: bytes = b""
    peer_trace: bytes = b""
    _own_trace: bool = False
    # A digest of what its blocks hold; b"" where the caller has not said.
    hashes: bytes = b""
    # Who waits for the outcome, and what is set when it is drained, if anybody waits.
    _waiters: tuple[asyncio.Future[None], ...] = ()
    # Nothing of kvwire can touch the transfer's blocks any more.
    is_drained: bool = False
    # None while it is not known.
    outcome: Outcome | None = None
    # What ended a transfer that has not begun yet.
    _ends: KVWireError | None = None
    # What keeps it from being drained.
    _busy: int = 0
    _lease: asyncio.TimerHandle | None = None
    _lease_until: float | None = None
    _expiry: asyncio.TimerHandle | None = None
    _free: asyncio.Event | None = None
    # It was open at the last look, and the log has named it.
    seen_open: bool = False
    named_in_log: bool = False

    def __init__(
        self,
        communicator: TransferServices,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        options: TransferOptions,
    ) -> None:
        priority, lease_s = options.get("priority", 0), options.get("lease_s")
        if not isinstance(cache, PagedCache):
            raise wrong_type("cache", cache, "a kvwire.PagedCache")
        if type(priority) is not int or not 0 <= priority <= PRIORITY_MAX:
            raise UsageError(
                f"priority={priority!r}: 0 to {PRIORITY_MAX}; a higher one goes first"
            )
        self.lease_s: float = communicator.config.lease_s
        if lease_s is not None:
            self.lease_s = seconds_of("lease_s", lease_s)
        self.id = id
        self.key: bytes = transfer_key(id)
        # A producer and a consumer of one name may live in one communicator.
        self.role_key: tuple[bytes, bool] = self.key, not self.receives
        self.cache = cache
        self.communicator = communicator
        self.thread: LoopThread = communicator.thread
        self.loop: asyncio.AbstractEventLoop = communicator.loop
        self.registry: TransferRegistry = communicator.registry
        self.observers: ObserverPort = communicator.watchers
        # Lends memory of the cache to links, until they have drained it.
        self.lend: Callable[[Payload], BufferId] = communicator.buffers.lend
        self.priority = priority
        self.tokens: Tokens = options.get("tokens")
        self.lists: BlockLists = cache.block_lists(blocks)
        if self.growing:
            self.lists = self.padded(self.lists)
        self.memory, self.memory_lists = cache, self.lists
        codec = options.get("codec")
        if codec is not None:
            self.memory, self.memory_lists = self.choose_memory(codec)
        self.geometry: Geometry = describe(self.memory, self.memory_lists, self.tokens)
        if self.memory.device is not None:
            # That a device does not work is known before anything is promised.
            communicator.devices.copy_engine(self.memory.device)
        deadline = options.get("deadline")
        self.deadline: float | None = None if deadline is None else absolute(deadline)
        self.phases: PhaseTimer = PhaseTimer()
        self.endpoint_id: bytes = os.urandom(ENDPOINT_ID_BYTES)
        self.ring: TraceRing | None = communicator.ring
        if self.ring is not None or self.observers.traced:
            self._open_trace()
        self.state: TransferState = TransferState.NEW

    def _open_trace(self) -> None:
        self.trace = self.observers.trace_context()
        self._own_trace = bool(self.trace)
        self.trace = self.trace or new_trace()

    def __await__(self) -> Generator[Any, Any, Outcome]:
        if self.outcome is None:
            waiter: asyncio.Future[None] = self.loop.create_future()
            self._waiters += (waiter,)
            try:
                yield from waiter
            finally:
                if self.outcome is None:
                    self._waiters = tuple(w for w in self._waiters if w is not waiter)
            assert self.outcome is not None
        elif not self.outcome.complete:
            yield  # one turn of the loop: see kvwire.aio
        return self.outcome

    async def drained(self) -> None:
        """Wait until nothing of kvwire can touch the transfer's blocks any more.

        Cancel safety: safe, it only watches.
        """
        if not self.is_drained:
            if self._free is None:
                self._free = asyncio.Event()
            await self._free.wait()

    def abort(self, reason: str = "aborted") -> None:
        """End the transfer; the peer learns at once. Memory is free once drained."""
        if self.outcome is None:
            self.stop(RequestCancelled(reason), WireCode.CANCELLED)

    # --- for the registry -------------------------------------------------------------

    def check_room(self) -> None:
        """Refuse to begin while too much memory waits to be let go of.

        Raises:
            UsageError: It does.
        """
        if not self.communicator.buffers.holds.retired:
            return
        quarantined = self.communicator.buffers.quarantined_bytes
        limit = self.communicator.config.quarantine_bytes
        if quarantined > limit:
            raise UsageError(
                f"{quarantined} bytes of transfers that are over have not drained, "
                f"more than quarantine_bytes={limit}: wait for drained() of some of "
                f"them"
            )

    def begin(self) -> None:
        """Start: notify observers and arm the deadline."""
        self.state = TRANSFER_TRANSITIONS[self.state, TransferInput.BEGIN]
        if self.observers.watchers:
            self.observers.begun(self)
        if self.ring is not None:
            side = "receive" if self.receives else "send"
            self.note("begin", text_of(self.id)[:NAME_CHARS_MAX], side)
        if self._ends is not None:  # to ask was enough to end it
            self._try_to_end(self._ends)
        elif self.deadline is not None and self.state is TransferState.OPEN:
            self._expiry = self.loop.call_at(self.deadline, self._expired)

    # --- for the two ends -------------------------------------------------------------

    def note(self, what: str, *more: str | int) -> None:
        """Note an event for a trace; only where there is a ring."""
        assert self.ring is not None
        self.ring.note(what, self.endpoint_id.hex(), *more)

    def note_peer(self, connection: ConnectionPort, trace: bytes) -> None:
        """Note the peer, and its trace: who has made one up here goes on with that."""
        self.peer_trace = trace or self.peer_trace
        if self.trace and trace and not self._own_trace:
            self.trace = trace
        if self.ring is not None:
            self.note("met", connection.peer.name[:NAME_CHARS_MAX])

    def description(self, peer_id: bytes = b"", plan: bytes = b"") -> TransferOffer:
        """Return this side's half of the description.

        Args:
            peer_id: The peer's end, if this side goes on with it.
            plan: The digest of this side's plan, in an answer.
        """
        raise NotImplementedError

    def padded(self, lists: BlockLists) -> BlockLists:
        """Return the lists of a growing transfer, with room for all its tokens."""
        raise NotImplementedError

    def choose_memory(self, codec: object) -> tuple[PagedCache, BlockLists]:
        """Return the cache that links touch, and where the listed blocks are in it."""
        raise NotImplementedError

    def stop(self, error: KVWireError, code: WireCode) -> None:
        """End every attempt with an error, and so the transfer."""
        raise NotImplementedError

    @property
    def waits_for(self) -> str:
        """Say what a transfer that is not over waits for, for logs and outcomes."""
        raise NotImplementedError

    @property
    def progress(self) -> Progress:
        """Count what is marked and what has landed; for snapshots, not for loops."""
        raise NotImplementedError

    @property
    def connections(self) -> Sequence[ConnectionPort]:
        """Return the connections it runs on now, or has run on last."""
        raise NotImplementedError

    @property
    def age_s(self) -> float:
        """Return the seconds since it was asked for."""
        return self.phases.age_s

    @property
    def finishing(self) -> bool:
        """Tell whether nothing but delivering it is left to do on this side."""
        return False

    def runs_on(self, connection: ConnectionPort) -> bool:
        """Tell whether a connection carries the transfer now."""
        raise NotImplementedError

    def lost(self, connection: ConnectionPort) -> None:
        """Release a connection whose link has touched memory for the last time."""
        raise NotImplementedError

    def start_lease(self) -> None:
        """Arm the lease: without its missing peer the transfer ends at its end.

        What is left of the lease when a peer comes back and is lost again without any
        progress is all there is: a link that breaks each time does not renew it.
        """
        if self._lease is None and self.outcome is None:
            if self._lease_until is None:
                self._lease_until = self.loop.time() + self.lease_s
            self._lease = self.loop.call_at(self._lease_until, self._lease_over)

    def stop_lease(self) -> None:
        """Disarm the lease: every peer is at work on the transfer."""
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None

    def renew_lease(self) -> None:
        """Start the lease anew, since there is progress."""
        self._lease_until = None
        if self._lease is not None:
            self.stop_lease()
            self.start_lease()

    def end(self, cause: KVWireError) -> None:
        """End the transfer, once; ``cause`` says why what is missing did not come.

        Where there is no memory for an outcome it is made in a moment: nobody would
        ever end the transfer otherwise.
        """
        if self.state is TransferState.NEW:
            self._ends = cause
        elif self.state is not TransferState.OPEN:
            return
        self.state = TRANSFER_TRANSITIONS[self.state, TransferInput.END]
        if self._ends is None:
            self._try_to_end(cause)

    def _try_to_end(self, cause: KVWireError) -> None:
        try:
            self.end_now(cause)
        except MemoryError:
            if self.outcome is not None:
                raise
            logger.error("transfer %r: no memory for its outcome", self.id)
            self.loop.call_later(NO_MEMORY_S, self._try_to_end, cause)

    def end_now(self, cause: KVWireError) -> None:
        """Make and record the outcome."""
        raise NotImplementedError

    def record(self, outcome: Outcome, attempts: Iterable[Attempt]) -> None:
        """Record the outcome; the memory drains when the attempts' buffers have."""
        self.state = TRANSFER_TRANSITIONS[self.state, TransferInput.RECORD]
        self.outcome = outcome
        self.communicator.counters.transfer_ended(outcome, received=self.receives)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self._lease is not None:
            self.stop_lease()
        if self._expiry is not None:
            self._expiry.cancel()
        self._busy += 1
        ran_on = []
        for attempt in attempts:
            ran_on.append(attempt.connection)
            self.release(attempt)
        self._one_free()
        if self.observers.watchers:
            self.observers.ended(self, outcome, ran_on)
        if self.ring is not None:
            self.note("end", outcome.state, outcome.nbytes, self.trace[:16].hex())

    def release(self, attempt: Attempt) -> None:
        """Wait for the memory of one attempt, and forget it once it is over."""
        buffers, released = self.communicator.buffers, attempt.release()
        buffers.collect()
        for buffer in buffers.undrained(released):
            self._busy += 1
            buffers.on_drained(buffer, self._one_free)

    def nothing(self, reason: str, tokens: Tokens = None) -> Outcome:
        """Return the outcome of a transfer of which nothing was ever agreed."""
        return nothing_landed(
            self.cache,
            self.lists,
            reason,
            tokens=self.tokens if tokens is None else tokens,
            timings=self.phases.timings(),
        )

    def _one_free(self) -> None:
        self._busy -= 1
        if not self._busy and self.state is TransferState.ENDED:
            self.state = TRANSFER_TRANSITIONS[self.state, TransferInput.DRAIN]
            self.is_drained = True
            if self._free is not None:
                self._free.set()

    def _expired(self) -> None:
        if self.outcome is None:
            error = DeadlineExceeded(
                f"the transfer's deadline passed: {self.waits_for}"
            )
            self.stop(error, WireCode.DEADLINE)

    def _lease_over(self) -> None:
        self._lease = None
        if self.outcome is None:
            error = DeadlineExceeded(
                f"the lease of {self.lease_s:g} s ended while a peer was missing: "
                f"{self.waits_for}"
            )
            self.stop(error, WireCode.DEADLINE)


def note_silence(
    phases: PhaseTimer, connection: ConnectionPort, interval_s: float
) -> None:
    """Count the time since a peer was last heard as lost, if that is long ago."""
    silent_s = connection.silent_s
    if silent_s > SILENT_INTERVALS * interval_s:
        phases.enter("lost", silent_s)


def damaged_of(
    plan: TransferPlan, segments: Sequence[Segment]
) -> list[tuple[str, Mapping[str, Bits]]]:
    """Return the reason of blocks that arrived damaged, as outcomes take it."""
    return [(DAMAGED, plan.covering(segments))]


def recoverable(error: KVWireError | None) -> bool:
    """Tell whether a transfer may go on with another link after this error."""
    return isinstance(error, ConnectionLost | PeerUnresponsive)
