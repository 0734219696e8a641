"""An outgoing transfer on its way to one consumer: marks become segments here.

Small layers go at once while nothing is under way, and wait for their neighbours while
something is (as Nagle's algorithm has it for small packets); large marks are cut.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from kvwire.description import Description
from kvwire.errors import KVWireError, ProfileMismatch, WireCode
from kvwire.kv.landed import Landed
from kvwire.kv.outcome import Outcome, Timings, outcome_of
from kvwire.kv.plan import Segment, Side, TransferPlan
from kvwire.limits import SEGMENT_BYTES
from kvwire.marks import Mark
from kvwire.proto.events import SegmentsAcknowledged
from kvwire.proto.state import State
from kvwire.transfer import Attempt, TransferEvent

if TYPE_CHECKING:
    from kvwire.connection import Connection
    from kvwire.outgoing import Outgoing


class Delivery(Attempt):
    """An outgoing transfer on its way to one consumer.

    Attributes:
        asked: This side asked, so it asks again after a lost link.
        attempts: Links it has run on before.
        suspended: Its link was lost, and it waits for another.
        incarnation: The consumer's.
    """

    plan: TransferPlan
    landed: Landed

    def __init__(self, outgoing: Outgoing, connection: Connection) -> None:
        super().__init__(connection)
        self.outgoing = outgoing
        self.incarnation = connection.peer.incarnation
        self.asked = False
        self.attempts = 0
        self.suspended = False
        self.planned = False
        self.reason = ""
        self._cursor = 0
        self._held: list[Mark] = []
        self._under_way = 0
        self._sent: dict[int, Segment] = {}
        self._settled = False
        self._committed = False
        self._grouped = 1
        self._times = dict.fromkeys(("agreed", "first", "last", "over"), 0.0)

    @property
    def waits(self) -> bool:
        """Whether its link is lost, and has touched memory for the last time."""
        return self.suspended and self.core is None

    def agreed(self, description: Description) -> None:
        """See Attempt."""
        self.peer_end = description.end
        try:
            self.plan_with(description, landed=description.landed)
            if description.plan != self.plan.digest:
                raise ProfileMismatch(
                    "the two sides would walk the bytes in different orders; their "
                    "versions of kvwire differ",
                    fields=("plan",),
                )
        except KVWireError as exc:
            self.refuse(exc, WireCode.PROFILE)
            return
        self.send_marks()

    def plan_with(
        self,
        description: Description,
        *,
        landed: tuple[tuple[int, int, int, int, int], ...],
    ) -> None:
        """Plan against the consumer's half.

        Raises:
            ProfileMismatch: The two halves do not fit; names the fields.
        """
        out = self.outgoing
        if out.hashes and description.hashes and out.hashes != description.hashes:
            raise ProfileMismatch(
                "the block hashes of the two lists differ: other tokens",
                fields=("hashes",),
            )
        peer = description.read_geometry()
        plan = TransferPlan(
            out.cache,
            out.lists,
            peer,
            Side.PRODUCER,
            tokens=out.tokens,
            have=description.read_have(peer),
        )
        if not self.planned:
            self.plan, self.landed, self.planned = plan, Landed(plan), True
        for box in landed:
            segment = Segment(*box)
            self.plan.check(segment)
            self.landed.mark(segment)
        if description.settled:
            for segment in self.plan.segments():
                self.landed.mark(segment)
        self._settled = description.settled
        self._times["agreed"] = self._times["agreed"] or monotonic()

    def send_marks(self) -> None:
        """Turn the marks that have come since the last time into segments."""
        core, marks = self.core, self.outgoing.marks
        if core is None or core.over or not self.planned or self._committed:
            return
        if core.state is not State.MOVING:
            return
        # Asked before the log is read: another thread may add the last mark meanwhile.
        all_in = marks.all_in
        while self._cursor < len(marks.log):
            self._take(marks.log[self._cursor])
            self._cursor += 1
        if all_in or not self._under_way:
            self._flush()
        if all_in:
            self._committed = True
            self.connection.core.transfers.commit(core, complete=marks.complete)
        self.connection.run()

    def event(self, event: TransferEvent) -> None:
        """See Attempt."""
        assert isinstance(event, SegmentsAcknowledged)
        for number in event.numbers:
            self.landed.mark(self._sent[number])
        self._under_way -= len(event.numbers)
        self._times["last"] = monotonic()
        self.send_marks()

    def ended(self, error: KVWireError | None) -> None:
        """See Attempt."""
        self._times["over"] = monotonic()
        self.outgoing.delivery_ended(self, error)

    def suspend(self) -> None:
        """The link is lost; what was not acknowledged is sent again on the next."""
        self.suspended = True

    def resume(self, connection: Connection) -> None:
        """Go on with another link."""
        self.connection = connection
        self.suspended = False
        self.attempts += 1
        self._cursor = 0
        self._held, self._sent, self._committed = [], {}, False
        self._under_way = 0

    def outcome(self, reason: str) -> Outcome:
        """What this consumer got."""
        times, created = self._times, self.outgoing.created
        end = times["over"] or monotonic()
        first, last = times["first"] or end, times["last"] or end
        agreed = times["agreed"] or end
        return outcome_of(
            self.landed,
            otherwise=self.reason or reason,
            timings=Timings(
                queue_s=0.0 if self.asked else agreed - created,
                memory_wait_s=agreed - created if self.asked else 0.0,
                wire_s=max(0.0, last - first),
                commit_s=max(0.0, end - last),
            ),
            layers_grouped=self._grouped,
        )

    def _take(self, mark: Mark) -> None:
        """Hold a mark back until it makes a segment, together with its neighbours."""
        held = self._held
        if held:
            before = held[-1]
            joins = (
                before.group == mark.group
                and before.blocks == mark.blocks
                and before.layers.stop == mark.layers.start
            )
            if not joins:
                self._flush()
        self._held.append(mark)
        if sum(map(self._nbytes, self._held)) >= self.outgoing.group_bytes:
            self._flush()

    def _flush(self) -> None:
        """Send what is held back as one mark."""
        if not self._held:
            return
        first, last = self._held[0], self._held[-1]
        whole = Mark(
            first.group, range(first.layers.start, last.layers.stop), first.blocks
        )
        self._held = []
        for segment in self._segments(whole):
            self._send(segment)

    def _send(self, segment: Segment) -> None:
        nbytes = self.plan.nbytes_of(segment)
        box = (
            segment.group,
            segment.layer,
            segment.layers,
            segment.granule,
            segment.granules,
        )
        if not nbytes or self._settled:
            return
        assert self.core is not None
        self._times["first"] = self._times["first"] or monotonic()
        self._grouped = max(self._grouped, segment.layers)
        lent = self.outgoing.communicator.buffers.lend(self.plan.fragments(segment))
        sent = self.connection.core.transfers.mark(self.core, box, lent, nbytes)
        self._sent[sent.number] = segment
        self._under_way += 1

    def _segments(self, mark: Mark) -> list[Segment]:
        """A mark as segments, none much larger than SEGMENT_BYTES."""
        first = self.outgoing.cache.groups[mark.group].spec.first_layer
        layers = [slice(first + mark.layers.start, first + mark.layers.stop)]
        if self.attempts:
            # Layer by layer, so that what has landed before can be left out.
            layers = [slice(first + n, first + n + 1) for n in mark.layers]
        blocks = slice(mark.blocks.start, mark.blocks.stop)
        found = [s for n in layers for s in self.plan.segments(n, blocks, mark.group)]
        pieces = [piece for segment in found for piece in self._cut(segment)]
        if self.attempts:
            return [piece for piece in pieces if not self.landed.has(piece)]
        return pieces

    def _cut(self, segment: Segment) -> list[Segment]:
        pieces = -(-self.plan.nbytes_of(segment) // SEGMENT_BYTES)
        if pieces < 2:
            return [segment]
        step = -(-segment.granules // pieces)
        return [
            Segment(
                segment.group,
                segment.layer,
                segment.layers,
                start,
                min(step, segment.granule + segment.granules - start),
            )
            for start in range(
                segment.granule, segment.granule + segment.granules, step
            )
        ]

    def _nbytes(self, mark: Mark) -> int:
        return sum(self.plan.nbytes_of(s) for s in self._segments(mark))
