"""An outgoing transfer on its way to one consumer: marks become segments here.

Small layers go at once while nothing is under way, and wait for their neighbours while
something is (as Nagle's algorithm has it for small packets); large marks are cut.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from kvwire.backend import Payload
from kvwire.errors import KVWireError, UsageError, WireCode
from kvwire.kv.landed import Landed
from kvwire.kv.outcome import Outcome, outcome_of
from kvwire.kv.plan import PlanSide, Segment, TransferPlan
from kvwire.limits import (
    AHEAD_BYTES,
    SEGMENT_BYTES,
    SEGMENTS_MAX,
    SEGMENTS_TOGETHER,
)
from kvwire.memory.iovec import simplest
from kvwire.proto.events import SegmentsAcknowledged
from kvwire.proto.records import TransferRecord
from kvwire.transfers.base import Attempt, TransferEvent, damaged_of, note_silence
from kvwire.transfers.description import TransferOffer
from kvwire.transfers.ports import ConnectionPort
from kvwire.transfers.ready_log import ReadyRange
from kvwire.transfers.state import (
    ATTEMPT_TRANSITIONS,
    ON_LINK,
    AttemptInput,
    AttemptState,
)
from kvwire.transfers.timings import PhaseTimer

if TYPE_CHECKING:
    from kvwire.transfers.outgoing import OutgoingState


class SendAttempt(Attempt):
    """Sends an outgoing transfer to one consumer.

    Attributes:
        plan: What the consumer gets, once it was met.
        planned: It was met, on this link or an earlier one.
        confirmed: The consumer has said something that shows that it knows our half:
            only then does what it had before count as landed on its side too.
    """

    state: AttemptState
    plan: TransferPlan
    landed: Landed

    def __init__(
        self, outgoing: OutgoingState, connection: ConnectionPort, *, asks: bool
    ) -> None:
        super().__init__(connection, asks=asks)
        self.outgoing = outgoing
        self.planned: bool = False
        self.confirmed: bool = False
        self.reason = ""
        self._phases = PhaseTimer(
            outgoing.phases.created, "memory_wait" if asks else "queue"
        )
        self._links = 1
        self._cursor = 0
        # Marks that wait for their neighbours, as one, and what of the plan that is.
        self._held: ReadyRange | None = None
        self._held_as: Segment | None = None
        self._held_bytes = 0
        self._under_way = 0
        # Sends what is held back, in a turn of the loop of its own.
        self._turn: asyncio.Handle | None = None
        # To be sent, in this turn or when the link has sent others.
        self._pieces: deque[tuple[Segment, int]] = deque()
        self._sent: dict[int, Segment] = {}
        self._damaged: list[Segment] = []
        self._grouped = 1

    def agreed(self, description: TransferOffer) -> None:
        try:
            self.plan_with(description)
            description.require_same_plan(self.plan.digest)
        except KVWireError as exc:
            self.refuse(exc, WireCode.PROFILE)
            return
        self.begin(settled=description.settled)

    def begin(self, *, settled: bool) -> None:
        """Send what was marked, as agreed, unless the consumer has all of it."""
        self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.AGREE]
        transfers = self.connection.transfers
        assert self.core is not None
        record = transfers.records[self.core]
        record.on_sent = self._link_sent
        # Chunks of a device overtake each other in staging.
        record.in_order = self.outgoing.memory.device is None
        if settled:
            self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.SETTLE]
        self.send_ready()

    def plan_with(self, description: TransferOffer) -> None:
        """Plan against the consumer's half.

        Raises:
            ProfileMismatch: The two halves do not fit; names the fields.
            UsageError: The consumer says what it has of blocks that there are not, or
                in a way that would take too long.
            BackendUnavailable: This connection cannot move memory of the device.
        """
        self._phases.enter("handshake")
        out = self.outgoing
        if description.trace or out.ring is not None:
            out.note_peer(self.connection, description.trace)
        self.peer_id: bytes = description.endpoint_id
        self.confirmed = self.confirmed or bool(description.peer_id)
        if out.memory.device is not None:
            self.connection.staging.open(out.memory.device)
        description.require_same_hashes(out.hashes)
        peer = description.read_geometry()
        # Without hashes on both sides nobody knows that it has the same blocks.
        comparable = out.hashes and description.hashes
        plan = TransferPlan(
            out.memory,
            out.memory_lists,
            peer,
            PlanSide.PRODUCER,
            tokens=out.tokens,
            have=description.read_have(peer) if comparable else None,
            local=out.geometry,
            named=out.lists,
        )
        if len(out.attempts) > 1:
            out.require_same_tokens(plan)
        if not self.planned:
            self.plan, self.landed = plan, Landed(plan)
            self.planned = True
        if description.landed:
            before = self.landed.left
            self.landed.mark_boxes([Segment(*box) for box in description.landed])
            if self.landed.left < before:
                out.renew_lease()
        self._phases.enter("mark_wait")

    def send_ready(self, *, in_turn: bool = False) -> None:
        """Turn the marks that have come since the last time into segments."""
        if self.state not in (AttemptState.MOVING, AttemptState.SETTLED):
            return
        core, marks = self.core, self.outgoing.ready_log
        assert core is not None
        if core.over:  # and this attempt is about to hear of it
            return
        # Asked before the log is read: another thread may add the last mark meanwhile.
        all_in = marks.all_in
        try:
            while self._cursor < len(marks.log):
                self._take(marks.log[self._cursor])
                self._cursor += 1
            if self._held is not None:
                if all_in or in_turn or not self._under_way:
                    self._flush()
                else:
                    self._take_turn()
        except UsageError as exc:
            self.outgoing.stop(exc, WireCode.TOO_LARGE)
            return
        self._send_pieces(all_in=all_in, complete=all_in and marks.complete)
        self.connection.run()

    def _send_pieces(self, *, all_in: bool, complete: bool) -> None:
        """Send pieces until the link has enough, and commit behind the last one.

        Both sides look up where each fragment lies: of a GiB at once that would hold
        their loops for milliseconds.
        """
        assert self.core is not None
        transfers, pieces = self.connection.transfers, self._pieces
        if self.state is AttemptState.SETTLED:
            pieces.clear()
        # The last segment says that it is the last one.
        rides = all_in and bool(pieces)
        record = transfers.records[self.core]
        while pieces and record.sending_bytes < AHEAD_BYTES:
            segment, nbytes = pieces.popleft()
            if self._phases.phase != "wire":
                self._phases.enter("wire")
            self._grouped = max(self._grouped, segment.layers)
            memory: Payload = self.plan.fragments(segment)
            if transfers.only_link:  # lanes know memory by its owner
                memory = simplest(memory)
            lent = self.outgoing.lend(memory)
            commit = 1 + complete if rides and not pieces else 0
            sent = transfers.mark(self.core, segment, lent, nbytes, commit)
            self._sent[sent.number] = segment  # bounded: SEGMENTS_MAX
            self._under_way += 1
            if self.outgoing.ring is not None:
                self.outgoing.note("sent", segment.layer, segment.layers, nbytes)
        record.on_sent_bytes = AHEAD_BYTES // 2 if pieces else 0
        if all_in and not pieces:
            self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.COMMIT]
            if not (self._under_way and self._phases.phase == "wire"):
                self._phases.enter("wire" if self._under_way else "commit")
            if not rides:
                transfers.commit(self.core, complete=complete)

    def event(self, event: TransferEvent) -> None:
        assert isinstance(event, SegmentsAcknowledged)
        self.confirmed = True
        for number in event.numbers:
            self.landed.mark(self._sent.pop(number))
        self.outgoing.renew_lease()
        self._under_way -= len(event.numbers)
        if self.outgoing.ring is not None:
            self.outgoing.note("acknowledged", len(event.numbers))
        if not self._under_way:
            committed = self.state is AttemptState.COMMITTED
            self._phases.enter("commit" if committed else "mark_wait")
        self.send_ready()

    def _link_sent(self) -> None:
        """Send the next pieces, or wait for marks: the link has sent what there was."""
        if self._pieces:
            if self._turn is None:
                self._turn = self.outgoing.loop.call_soon(self._in_turn)
        elif self.state is AttemptState.MOVING:
            self._phases.enter("mark_wait")
            if self._held is not None:
                self._take_turn()

    def _take_turn(self) -> None:
        """Send what is held back after this turn of the loop, if not too much is sent.

        The marks of one turn go together.
        """
        assert self.core is not None
        if self._turn is not None or self._under_way >= SEGMENTS_TOGETHER:
            return
        if not self.connection.transfers.records[self.core].sending_bytes:
            self._turn = self.outgoing.loop.call_soon(self._in_turn)

    def _in_turn(self) -> None:
        self._turn = None
        self.send_ready(in_turn=True)

    def ended(self, error: KVWireError | None) -> None:
        try:
            if error is None:
                assert self.core is not None
                self.confirmed = True
                self._note_settled(self.connection.transfers.records[self.core])
        finally:  # without memory to note it too: no other word of the end comes
            self.outgoing.attempt_ended(self, error)
        if self.state is AttemptState.OVER or self.core is None:
            # Each names the other; else only the garbage collector would end both.
            del self.outgoing

    def _note_settled(self, record: TransferRecord) -> None:
        """Note what has landed that no event has named, and what came damaged."""
        for number, segment in self._sent.items():
            if record.segments[number].damaged:
                self._damaged.append(segment)  # bounded: SETTLED_MAX
            else:
                self.landed.mark(segment)
        landed = len(self._sent) - len(self._damaged)
        if self.outgoing.ring is not None and landed:
            self.outgoing.note("acknowledged", landed)

    def resume(self, connection: ConnectionPort) -> None:
        """Go on with another link: what was not acknowledged is sent again."""
        self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.RESUME]
        self.connection = connection
        self._links += 1
        self._cursor = 0
        self._held = None
        self._pieces.clear()
        self._sent = {}
        self._under_way = 0

    def note_served(self) -> None:
        """Count the time from here on as waiting for the last word of others."""
        self._phases.enter("commit")

    def note_lost(self) -> None:
        """Count the time from here on, and that of its silence, as lost."""
        self._note_silence()
        self._phases.enter("lost")

    def _note_silence(self) -> None:
        if self.state in ON_LINK or self.state is AttemptState.REFUSED:
            interval_s = self.outgoing.communicator.config.ping_interval_s
            note_silence(self._phases, self.connection, interval_s)

    def outcome(self, reason: str) -> Outcome:
        """Return what this consumer got."""
        self._note_silence()
        return outcome_of(
            self.landed if self.confirmed else Landed(self.plan, held=False),
            reasons=damaged_of(self.plan, self._damaged) if self._damaged else (),
            otherwise=self.reason or reason,
            timings=self._phases.timings(),
            layers_grouped=self._grouped,
        )

    def _take(self, mark: ReadyRange) -> None:
        """Hold a mark back until it makes a segment, together with its neighbours."""
        held, plan = self._held, self.plan
        if held is not None:
            if _joins(held, mark):
                layers = range(held.layers.start, mark.layers.stop)
                mark = ReadyRange(mark.group, layers, mark.blocks)
            else:
                self._flush()
        named = plan.marked(plan.indices[mark.group], mark.layers, mark.blocks)
        self._held, self._held_as = mark, named
        self._held_bytes = 0 if named is None else plan.nbytes_of(named)
        if self._held_bytes >= self.outgoing.group_bytes:
            self._flush()

    def _flush(self) -> None:
        """Send what is held back as one mark."""
        named, nbytes = self._held_as, self._held_bytes
        self._held = None
        if named is None or self.state is AttemptState.SETTLED:
            return
        parts = [(named, nbytes)]
        if self._links > 1:  # after a lost link, what has not landed
            parts = [(p, self.plan.nbytes_of(p)) for p in self.landed.lacking(named)]
        for part, nbytes in parts:
            if nbytes > SEGMENT_BYTES:
                self._cut(part, nbytes)
            elif nbytes:
                self._pieces.append((part, nbytes))  # bounded: SEGMENTS_MAX
        assert self.core is not None
        sent = self.connection.transfers.records[self.core].segments
        if len(sent) + len(self._pieces) > SEGMENTS_MAX:
            raise UsageError(
                f"more than {SEGMENTS_MAX} segments in one transfer: mark more layers "
                f"or blocks at once"
            )

    def _cut(self, segment: Segment, nbytes: int) -> None:
        """Queue a segment in pieces, none much larger than SEGMENT_BYTES.

        Of whole layers, so that the first can be read while the others come, unless the
        bytes of a block's layers lie together.
        """
        order = self.plan.groups[segment.group].order
        layers = segment.layers
        if order.index("layer") < order.index("block"):
            layers = max(1, SEGMENT_BYTES * segment.layers // nbytes)
        pieces = -(-nbytes * layers // segment.layers // SEGMENT_BYTES)
        granules = -(-segment.granules // max(1, pieces))
        for layer in _cut_range(segment.layer_range, layers):
            for part in _cut_range(segment.granule_range, granules):
                piece = Segment(
                    segment.group, layer.start, len(layer), part.start, len(part)
                )
                if nbytes := self.plan.nbytes_of(piece):
                    self._pieces.append((piece, nbytes))  # bounded: SEGMENTS_MAX


def _cut_range(whole: range, step: int) -> list[range]:
    return [whole[start : start + step] for start in range(0, len(whole), step)]


def _joins(before: ReadyRange, mark: ReadyRange) -> bool:
    """Tell whether a mark goes on with the layers of the one before."""
    return (
        before.group == mark.group
        and before.blocks == mark.blocks
        and before.layers.stop == mark.layers.start
    )
