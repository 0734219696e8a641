"""One peer's part of a KV transfer, over all the links that carry it.

Producer and consumer use the same class. They differ only in the :class:`Flow`, which
moves segments on one link. A leg gets a new flow with each link, and keeps the state
that is independent of links: the peer, the plan, and the landed parts.

A leg outlives its transfer as long as its peer may not know how the transfer ended. A
consumer that has everything reports so again on the next link. A side that requested
the transfer and then gave up requests it once more, only to report that it gave up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.errors import (
    ConnectionLost,
    KVWireError,
    PeerCancelled,
    PeerUnresponsive,
    ProfileMismatch,
    ProtocolError,
    WireCode,
)
from kvwire.kv.fragments import Payload
from kvwire.kv.landed import Landed
from kvwire.kv.outcome import Outcome, outcome_of
from kvwire.kv.plan import Segment, TransferPlan
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.events import (
    SegmentLanded,
    SegmentMarked,
    SegmentsAcknowledged,
    TransferSettled,
)
from kvwire.proto.records import RequestRecord
from kvwire.transfers.offer import TransferOffer
from kvwire.transfers.state import (
    LEG_TRANSITIONS,
    ON_LINK,
    OVER,
    LegInput,
    LegState,
    TransferState,
)
from kvwire.transfers.timings import PhaseTimer
from kvwire.types import BufferId

if TYPE_CHECKING:
    from kvwire.transfers.transfer import Transfer

# A peer without anything else to send sends one ping per interval.
SILENT_INTERVALS = 1.5
DAMAGED = "its bytes arrived damaged"
UNMARKED = "it was not marked ready by the producer"

_MOVING = LegState.MOVING
_OPEN = TransferState.OPEN

TransferEvent = SegmentMarked | SegmentLanded | SegmentsAcknowledged | TransferSettled


class Flow(Protocol):
    """Moves the segments of one leg on one link."""

    def event(self, event: TransferEvent) -> None:
        """Handle a core's event about a segment.

        Raises:
            ProtocolError: The peer breaks the rules; the connection ends with it.
        """

    def send(self) -> None:
        """Send the parts that were marked since the last call."""

    def end(self, error: KVWireError | None) -> None:
        """Record arrivals that no event has reported."""


class Leg:
    """Runs a transfer with one peer, on one link at a time.

    Attributes:
        transfer: This side's end; dropped when the leg is over.
        link: The connection that carries the leg now, or was the last to carry it.
        origin: Identifies the start of the peer's process; only this start may resume
            the leg.
        peer_id: The id of the peer's end, the same on all links; empty before the two
            have met.
        asks: Whether this side requests the transfer, also after a lost link.
        state: See kvwire.transfers.state.
        core: The request on the link; None if no link can touch the leg's memory.
        planned: Whether both sides have met and fit, so that ``plan`` and ``landed``
            are set.
        plan: The bytes to move, and their order.
        landed: The parts that the consumer has.
        damaged: Segments that arrived damaged; they count as missing.
        confirmed: Whether the consumer is known to have read our description. Only then
            do the blocks that it had before count as landed on the producer's side too.
        grouped: The largest number of layers in one segment.
        phases: Measures the leg's waits by phase; a transfer's only leg shares the
            transfer's timer.
        reason: Why the peer ended the leg; "" if it did not.
        flow: Moves segments on the link; None before the two sides agree on it.
        links: The number of links that have carried it.
    """

    __slots__ = (
        "asks",
        "confirmed",
        "core",
        "damaged",
        "flow",
        "grouped",
        "landed",
        "link",
        "links",
        "origin",
        "peer_id",
        "phases",
        "plan",
        "planned",
        "reason",
        "state",
        "transfer",
    )

    plan: TransferPlan
    landed: Landed

    def __init__(
        self,
        transfer: Transfer,
        link: ConnectionDriver,
        phases: PhaseTimer,
        *,
        asks: bool,
    ) -> None:
        self.transfer: Transfer = transfer
        self.link: ConnectionDriver = link
        self.origin: bytes = link.peer.origin
        self.peer_id: bytes = b""
        self.asks: bool = asks
        self.state: LegState = LegState.ASKED
        self.core: RequestRecord | None = None
        self.planned: bool = False
        self.damaged: list[Segment] = []
        self.confirmed: bool = transfer._receives
        self.grouped: int = 1
        self.phases: PhaseTimer = phases
        self.reason: str = ""
        self.flow: Flow | None = None
        self.links: int = 0

    def step(self, what: LegInput) -> None:
        """Change the state; the only method that does."""
        self.state = LEG_TRANSITIONS[self.state, what]

    # --- a link -----------------------------------------------------------------------

    def ask(self, link: ConnectionDriver) -> None:
        """Ask the peer of a link to start or resume the transfer.

        Raises:
            UsageError: The peer has too many transfers to answer already.
            ConnectionClosed: The connection is closing or closed.
        """
        self._carry(link)
        transfer = self.transfer
        try:
            link.start_transfer(
                self,
                key=transfer._key,
                priority=transfer._priority,
                description=transfer._offer(self.peer_id).encode(),
                pull=transfer._receives,
            )
        except KVWireError:
            # No request was made, so no link can touch memory for this leg.
            self.step(LegInput.LOSE)
            self.step(LegInput.RELEASE)
            raise

    def answer(
        self, link: ConnectionDriver, core: RequestRecord, offer: TransferOffer
    ) -> None:
        """Answer a peer that asks on this link to start or resume the transfer."""
        self._carry(link)
        self.core = core
        core.context = self
        transfer = self.transfer
        transfers = link.transfers
        if transfer._state in OVER:
            answer = transfer._offer(self.peer_id, self.plan.digest)
            transfers.agree(core, answer.encode())
            self._report_end()
            link.run()
            return
        try:
            self._meet(offer)
        except KVWireError as exc:
            self.refuse(exc, WireCode.PROFILE)
            return
        if transfer._receives:
            answer = transfer._offer(self.peer_id, self.plan.digest)
        else:
            answer = transfer._offer(plan=self.plan.digest)
            # The producer schedules the chunks, with the higher of both sides'
            # priorities.
            record = transfers.records[core]
            record.priority = max(record.priority, transfer._priority)
        transfers.agree(core, answer.encode())
        self._begin(settled=offer.settled)
        link.run()

    def agreed(self, offer: TransferOffer) -> None:
        """Handle the peer's answer to this side's request."""
        if self.state is LegState.REFUSED:
            return  # the answer was under way when this side ended the leg
        if self.transfer._state in OVER:
            self._report_end()
            return
        try:
            self._meet(offer)
            offer.require_same_plan(self.plan.digest)
        except KVWireError as exc:
            self.refuse(exc, WireCode.PROFILE)
            return
        self._begin(settled=offer.settled)

    @property
    def memory_of(self) -> Callable[[Segment], Payload]:
        """Return the function that returns a segment's local memory."""
        if self.link.transfers.only_link:
            return self.plan.memory
        return self.plan.fragments  # lanes identify memory by its owner

    def _carry(self, link: ConnectionDriver) -> None:
        if self.links:
            self.step(LegInput.RESUME)
            # The segments of the previous link do not belong to this link's request.
            self.flow = None
        self.link = link
        self.links += 1

    def _begin(self, *, settled: bool) -> None:
        """Start to move segments on the link, after both sides have agreed."""
        self.step(LegInput.AGREE)
        # everything arrived over an earlier link
        if settled and not self.transfer._receives:
            self.step(LegInput.SETTLE)
        self.flow = flow = self.transfer._flow(self)
        flow.send()

    def _report_end(self) -> None:
        """Agree, then settle or refuse at once, because the transfer has ended here.

        A consumer that has everything reports just that, so that the producer counts
        everything as landed and sends nothing to memory that has a new owner.
        """
        self.step(LegInput.AGREE)
        error = self.transfer._given_up
        if error is None:
            self.step(LegInput.SETTLE)
        else:
            self.refuse(error, WireCode.CANCELLED)

    def _meet(self, offer: TransferOffer) -> None:
        """Make the plan from this side's and the peer's descriptions.

        Raises:
            ProfileMismatch: The two descriptions do not fit; the error names the
                fields.
            UsageError: The consumer reports parts that do not exist, or that would take
                too long to record.
            BackendUnavailable: This connection cannot move the device's memory.
        """
        transfer = self.transfer
        self.phases.enter("handshake")
        if offer.trace or transfer._ring is not None:
            transfer._note_peer(self.link, offer.trace)
        self.confirmed = self.confirmed or bool(offer.peer_id)
        if transfer._memory.device is not None:
            self.link.staging.open(transfer._memory.device)
        offer.require_same_hashes(transfer._hashes)
        if self.peer_id not in (b"", offer.endpoint_id):
            raise ProfileMismatch(
                "the peer now has another transfer with this id", fields=("end",)
            )
        self.peer_id = offer.endpoint_id
        peer = offer.read_geometry()
        # Without hashes from both sides, equal blocks cannot be recognised.
        comparable = transfer._hashes and offer.hashes
        plan = TransferPlan(
            transfer._memory,
            transfer._memory_lists,
            peer,
            transfer._side,
            tokens=transfer._tokens,
            have=transfer._held_by(offer, peer) if comparable else None,
            local=transfer._geometry,
            named=transfer._lists,
        )
        transfer._check_plan(plan)
        if not self.planned:
            # The first plan is kept: the same two ends have the same plan on every
            # link.
            self.plan = plan
            self.landed = Landed(plan)
            self.planned = True
        transfer._met(self, offer)
        self.phases.enter("mark_wait")

    # --- what the link brings ---------------------------------------------------------

    def event(self, event: TransferEvent) -> None:
        """Handle an event of the leg's segments.

        Raises:
            ProtocolError: The peer breaks the rules; the connection ends with it.
        """
        if self.state is LegState.REFUSED:
            return  # the event was under way when this side ended the leg
        transfer = self.transfer
        flow = self.flow
        if transfer._state in OVER:
            if isinstance(event, SegmentMarked):
                raise ProtocolError(
                    "KVW-TR-10",
                    "SEGMENT arrived for a transfer that the consumer has settled",
                )
        elif isinstance(event, TransferSettled):
            self.step(LegInput.SETTLE)
            transfer._end(PeerCancelled(UNMARKED))
        else:
            assert flow is not None
            flow.event(event)

    def ended(self, error: KVWireError | None) -> None:
        """Handle the end of the leg's request; called once for each request."""
        assert self.core is not None
        self.core.context = None  # its end is reported; see `release`
        try:
            if self.flow is not None:
                self.flow.end(error)
        finally:  # even if memory for the record is lacking: only this reports the end
            self._note_end(error)

    def _note_end(self, error: KVWireError | None) -> None:
        """Decide at a request's end whether the leg has ended or may resume.

        Before: the request is over, and the link may still touch memory. After: the leg
        is LOST, and resumes once that link has released the memory; or it is over and
        has notified its transfer, which ends or serves its other peers.
        """
        transfer = self.transfer
        lost = transfer._services.config.resume and self.may_resume(error)
        if transfer._state in (TransferState.NEW, TransferState.OPEN):
            if lost:
                self._note_silence(transfer)
                self.phases.enter("lost")
                self.step(LegInput.LOSE)
                if transfer._ring is not None:
                    transfer._note("lost")
                transfer._watch_lease()
                return
            self.step(LegInput.END)
            transfer._leg_over(self, error)
        elif lost:
            # The peer may not know how it ended here; the next link carries the report.
            self.step(LegInput.LOSE)
            if transfer._outcome is not None:
                self.release()
            transfer._services.registry.owe(self)
            return
        else:
            self.step(LegInput.END)
            if transfer._outcome is not None:
                self.release()
            transfer._services.registry.peer_knows(self)
        if self.state is LegState.OVER or self.core is None:
            # Break the reference cycle, or only the garbage collector would free both.
            self.flow = None
            del self.transfer

    def may_resume(self, error: KVWireError | None) -> bool:
        """Return whether another link may carry the leg after this end of its request.

        A refused leg has ended on this side. Its error is this side's own, such as the
        loss of another peer.
        """
        return self.state in ON_LINK and recoverable(error)

    # --- the end ----------------------------------------------------------------------

    def refuse(self, error: KVWireError, code: WireCode) -> None:
        """End the leg and send the reason to the peer, unless the request has ended."""
        if self.core is not None and not self.core.over:
            self.step(LegInput.REFUSE)
            self.link.core.refuse(self.core, error, code)
            self.link.run()

    def release(self) -> list[BufferId]:
        """Retire the memory of the leg's segments, and return their buffers.

        After its request has ended, the leg leaves the link. Transports that may still
        touch the memory keep their holds on it, and another link may now carry a lost
        leg.
        """
        core = self.core
        if core is None:
            return []
        # While an event is handled, the end of a refused leg is still to be reported.
        if core.context is self or self.state in ON_LINK:
            return self.link.transfers.retire(core)
        self.core = None
        if self.state is LegState.LOST:
            self.step(LegInput.RELEASE)
        return self.link.transfers.forget(core)

    def outcome(self, transfer: Transfer, reason: str) -> Outcome:
        """Return the consumer's outcome; missing parts get this ``reason``."""
        self._note_silence(transfer)
        landed = self.landed if self.confirmed else Landed(self.plan, held=False)
        damaged = [(DAMAGED, self.plan.covering(self.damaged))] if self.damaged else []
        return outcome_of(
            landed,
            reasons=damaged,
            otherwise=self.reason or reason,
            timings=self.phases.timings(),
            layers_grouped=self.grouped,
        )

    def _note_silence(self, transfer: Transfer) -> None:
        """Record the last wait of an ending leg; a long silence counts as lost."""
        if self.state not in ON_LINK and self.state is not LegState.REFUSED:
            return
        phases = self.phases
        if transfer._receives:
            if phases.phase == "mark_wait" and self.landed.complete:
                phases.phase = "commit"
            if self.state is LegState.SETTLED:
                # a frame that has just arrived settled it, so the peer is not silent
                return
        silent_s = self.link.silent_s
        if silent_s > SILENT_INTERVALS * transfer._services.config.ping_interval_s:
            phases.enter("lost", silent_s)


def segment_event(core: ConnectionCore, event: SegmentMarked | SegmentLanded) -> None:
    """Hand a core's event about a segment to the leg of its request."""
    leg = event.segment.request.context
    if not isinstance(leg, Leg):
        return
    try:
        flow = leg.flow
        if leg.state is _MOVING and leg.transfer._state is _OPEN and flow is not None:
            flow.event(event)
        else:
            leg.event(event)
    except ProtocolError as exc:
        core.fail(exc)


def recoverable(error: KVWireError | None) -> bool:
    """Return whether a transfer may continue on another link after this error."""
    return isinstance(error, ConnectionLost | PeerUnresponsive)
