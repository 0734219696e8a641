"""The last word of an end, where the link was lost before the peer heard it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvwire.errors import KVWireError, ProtocolError, WireCode
from kvwire.proto.events import SegmentMarked
from kvwire.transfers.base import Attempt, TransferEvent, recoverable
from kvwire.transfers.description import TransferOffer
from kvwire.transfers.ports import ConnectionPort
from kvwire.transfers.state import ATTEMPT_TRANSITIONS, AttemptInput, AttemptState

if TYPE_CHECKING:
    from kvwire.transfers.incoming import IncomingState
    from kvwire.transfers.outgoing import OutgoingState


class SettleAttempt(Attempt):
    """Tells a peer over another link how a transfer ended here on the last one.

    A consumer that has settled tells its producer: it has its outcome and may be using
    the memory for something else, so nothing may land any more, and the producer is
    told that everything has. Whoever asked, and gave up while there was no link, asks
    once more to say that.

    Attributes:
        end: The end that is over here.
        plan: The digest of its plan, for a producer that asks again.
        error: Why it was given up; None if it was settled.
        key: Its name, and the end's over all links.
    """

    state: AttemptState

    def __init__(
        self,
        end: IncomingState | OutgoingState,
        attempt: Attempt,
        *,
        plan: bytes = b"",
        error: KVWireError | None = None,
    ) -> None:
        super().__init__(
            attempt.connection, asks=attempt.asks, state=AttemptState.WAITING
        )
        self.end = end
        self.plan = plan
        self.error = error
        self.peer_id: bytes = attempt.peer_id
        self.key: tuple[bytes, bytes] = (end.key, end.endpoint_id)

    @property
    def waits(self) -> bool:
        """Tell whether no link carries the attempt, so that the next one may."""
        return self.state is AttemptState.WAITING

    def ask_again(self, connection: ConnectionPort) -> None:
        """Ask again, to tell the peer that all is settled, or that it was given up."""
        self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.RESUME]
        self.ask(connection, self.end)

    def matched(self, connection: ConnectionPort, core: Any) -> None:
        """Answer a producer that pushes again, not having heard that all is settled."""
        self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.RESUME]
        self.connection = connection
        self.core = core
        core.context = self
        answer = self.end.description(self.peer_id, self.plan)
        connection.transfers.agree(core, answer.encode())
        self._agreed()
        connection.run()

    def agreed(self, description: TransferOffer) -> None:
        self._agreed()

    def _agreed(self) -> None:
        self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.AGREE]
        if self.error is None:
            self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.SETTLE]
        else:
            self.refuse(self.error, WireCode.CANCELLED)

    def event(self, event: TransferEvent) -> None:
        if isinstance(event, SegmentMarked) and self.error is None:
            raise ProtocolError(
                "KVW-TR-10", "SEGMENT in a transfer that the consumer has settled"
            )

    def ended(self, error: KVWireError | None) -> None:
        lost = recoverable(error)
        self.state = ATTEMPT_TRANSITIONS[
            self.state, AttemptInput.LOSE if lost else AttemptInput.END
        ]
        self.release()
        if lost:
            self.end.registry.notify_again(self)
        else:
            self.end.registry.confirmed(self)
