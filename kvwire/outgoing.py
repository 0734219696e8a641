"""The producer's end of a KV transfer: marks go in, segments go out.

One :class:`Outgoing` may serve several consumers, such as the ranks of a
tensor-parallel group, each with its own plan. They all read the same log of marks. A
mark becomes segments when the consumer is there: small layers are held back until they
make a segment worth announcing, large ones are cut.
"""

from __future__ import annotations

from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvwire.dedup import Hashes, digest, listed_hashes
from kvwire.description import Description
from kvwire.errors import KVWireError, ProfileMismatch, RequestCancelled, WireCode
from kvwire.kv.landed import Landed
from kvwire.kv.outcome import Outcome, Timings, join_outcomes, outcome_of
from kvwire.kv.plan import Segment, Side, TransferPlan
from kvwire.limits import GROUP_BYTES, SEGMENT_BYTES
from kvwire.marks import Mark, Marks, Which
from kvwire.proto.events import SegmentsAcknowledged
from kvwire.proto.state import State
from kvwire.transfer import Answer, Attempt, KVTransfer, TransferEvent, recoverable

if TYPE_CHECKING:
    from kvwire.connection import Connection


class Outgoing(KVTransfer):
    """A transfer that this side produces. Made by ``publish`` and ``push``.

    ``async with out:`` finishes at the end of the block, and aborts if the block is
    left by an exception.
    """

    def __init__(
        self,
        *args: Any,
        consumers: int = 1,
        group_bytes: int | None = None,
        hashes: Hashes = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*args, **keywords)
        self.consumers = consumers
        self.hashes = digest(listed_hashes(hashes, self.lists))
        self.group_bytes = GROUP_BYTES if group_bytes is None else group_bytes
        self.marks = Marks(self.cache, self.lists, self.loop, self._marked)
        self.deliveries: list[Delivery] = []

    def ready(
        self,
        layers: Which = None,
        blocks: Which = None,
        *,
        group: str | None = None,
        after: Any = None,
    ) -> None:
        """Say that this part of the cache will not change any more; it flows at once.

        Thread-safe and non-blocking. The memory may be neither written nor reused until
        :meth:`drained`.

        Args:
            layers: A layer by the model's index, or a slice of them; None for all.
            blocks: A position in the transfer's block list (not a block id), or a
                slice; None for all.
            group: Of a hybrid model's cache; None where there is one group.
            after: A future: the part is ready when it is done.

        Raises:
            UsageError: There is no such part, or it was marked before.
        """
        self.marks.add(layers, blocks, group, after)

    def finish(self, *, partial: bool = False) -> None:
        """No more marks: commit. Thread-safe and non-blocking.

        Args:
            partial: Commit although parts were not marked; the outcome names them.

        Raises:
            UsageError: Parts were not marked, and ``partial`` is not set.
        """
        self.marks.finish(partial=partial)

    async def __aenter__(self) -> Self:
        """The transfer itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish, or abort if the block was left by an exception."""
        if kind is not None:
            self.abort(f"{kind.__name__} in the producer")
        elif not self.done():
            self.finish()

    # --- the exchange -----------------------------------------------------------------

    def answer_to(self, connection: Connection, description: Description) -> Answer:
        """Whether a peer that asks may have it."""
        known = self._known(connection, description)
        if self.outcome is not None or (known is not None and known.over):
            return Answer.NO
        if known is not None:
            return Answer.YES if known.waits else Answer.LATER
        if description.landed or description.settled:
            return Answer.NO  # it goes on with another transfer of this name
        return Answer.YES if len(self.deliveries) < self.consumers else Answer.NO

    @property
    def unmet(self) -> int:
        """How many consumers do not know how it ended, and may still ask."""
        return self.consumers - sum(not d.suspended for d in self.deliveries)

    def interrupted(self, incarnation: bytes) -> bool:
        """Whether it waits for another link to a peer."""
        return any(
            d.suspended and d.incarnation == incarnation for d in self.deliveries
        )

    def asks(self, incarnation: bytes) -> bool:
        """Whether it is this side that asks again on another link."""
        return any(
            d.waits and d.asked and d.incarnation == incarnation
            for d in self.deliveries
        )

    def ask(self, connection: Connection) -> None:
        """Push: ask the peer of a connection to take it."""
        waiting = [d for d in self.deliveries if d.waits]
        delivery = self._delivery(connection, waiting[0] if waiting else None)
        description = Description(
            geometry=self.geometry.encode(),  # type: ignore[arg-type]
            hashes=self.hashes,
            end=self.end,
            attempt=delivery.attempts,
        )
        delivery.asked = True
        try:
            connection.start_transfer(
                delivery,
                key=self.key,
                priority=self.priority,
                description=description.encode(),
                pull=False,
            )
        except KVWireError:
            if delivery.attempts:
                delivery.suspend()
                self.start_lease()
            else:
                self.deliveries.remove(delivery)
            raise

    def meet(self, connection: Connection, core: Any, description: Description) -> None:
        """Pull: the peer of a connection asks for it."""
        known = self._known(connection, description)
        delivery = self._delivery(connection, known)
        delivery.core, delivery.peer_end = core, description.end
        core.context = delivery
        try:
            delivery.plan_with(description, landed=description.landed)
        except KVWireError as exc:
            self.deliveries.remove(delivery)
            if not self.deliveries:
                self.start_lease()
            connection.core.refuse(core, exc, WireCode.PROFILE)
            connection.core.transfers.forget(core)
            connection.run()
            return
        answer = Description(
            geometry=self.geometry.encode(),  # type: ignore[arg-type]
            hashes=self.hashes,
            end=self.end,
            plan=delivery.plan.digest,
        )
        connection.core.transfers.agree(core, answer.encode())
        delivery.send_marks()

    def stop(self, error: KVWireError, code: WireCode) -> None:
        """See KVTransfer."""
        for delivery in list(self.deliveries):
            delivery.refuse(error, code)
        if self.outcome is None:
            self._finish(str(error))

    @property
    def finishing(self) -> bool:
        """See KVTransfer."""
        return self.marks.finished and bool(self.deliveries)

    def runs_on(self, connection: Connection) -> bool:
        """See KVTransfer."""
        return any(d.connection is connection for d in self.deliveries)

    def lost(self, connection: Connection) -> None:
        """See KVTransfer."""
        for delivery in self.deliveries:
            if delivery.connection is connection and delivery.suspended:
                self.release(delivery)

    # --- inside -----------------------------------------------------------------------

    def delivery_ended(self, delivery: Delivery, error: KVWireError | None) -> None:
        """One consumer is served, or lost."""
        if self.outcome is not None:
            return
        if recoverable(error) and self.communicator.config.resume:
            delivery.suspend()
            self.start_lease()
            return
        delivery.over = True
        delivery.reason = "" if error is None else str(error)
        if error is not None:
            # What one rank of a group lacks, the group cannot use.
            rest = [d for d in self.deliveries if not d.over]
            for other in rest:
                other.refuse(RequestCancelled(str(error)), WireCode.CANCELLED)
            if self.outcome is None:
                self._finish(str(error))
        elif sum(d.over for d in self.deliveries) == self.consumers:
            self._finish("it was not marked ready by the producer")

    def _known(
        self, connection: Connection, description: Description
    ) -> Delivery | None:
        """The delivery that a peer's question belongs to, if it is not a new one."""
        for delivery in self.deliveries:
            same_peer = delivery.incarnation == connection.peer.incarnation
            if same_peer and delivery.peer_end == description.end:
                return delivery
        return None

    def _delivery(self, connection: Connection, known: Delivery | None) -> Delivery:
        """A new consumer, or one whose last connection was lost."""
        self.stop_lease()
        if known is not None:
            known.resume(connection)
            return known
        delivery = Delivery(self, connection)
        self.deliveries.append(delivery)  # bounded by `consumers`
        return delivery

    def _marked(self) -> None:
        for delivery in self.deliveries:
            delivery.send_marks()

    def _finish(self, reason: str) -> None:
        outcomes = [d.outcome(reason) for d in self.deliveries if d.planned]
        if not outcomes:
            outcome = self.nothing(reason)
        elif len(outcomes) == 1:
            outcome = outcomes[0]
        else:
            outcome = join_outcomes(outcomes)
        self.communicator.exchange.over(self, reason)
        self.record(outcome, self.deliveries)


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
