"""The producer's end of a KV transfer: marks go in, segments go out.

One :class:`Outgoing` may serve several consumers, such as the ranks of a
tensor-parallel group, each with its own plan: a :class:`~kvwire.delivery.Delivery`.
They all read the same log of marks.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvwire.dedup import Hashes, digest, listed_hashes
from kvwire.delivery import Delivery
from kvwire.description import Description
from kvwire.errors import KVWireError, RequestCancelled, WireCode
from kvwire.kv.outcome import join_outcomes
from kvwire.limits import GROUP_BYTES
from kvwire.marks import Marks, Which
from kvwire.transfer import Answer, KVTransfer, recoverable

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
