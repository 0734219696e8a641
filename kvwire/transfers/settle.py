"""The consumer's last word, where the link was lost before the producer heard it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvwire.errors import KVWireError, ProtocolError
from kvwire.proto.events import SegmentMarked
from kvwire.transfers.base import Attempt, TransferEvent, recoverable
from kvwire.transfers.description import TransferOffer
from kvwire.transfers.ports import ConnectionPort
from kvwire.transfers.state import ATTEMPT_TRANSITIONS, AttemptInput, AttemptState

if TYPE_CHECKING:
    from kvwire.transfers.incoming import IncomingState
    from kvwire.transfers.receiver import ReceiveAttempt


class SettleAttempt(Attempt):
    """Tells a producer over another link that its transfer was settled on the last one.

    The consumer has its outcome and may be using the memory for something else, so
    nothing may land any more: the producer is told that everything has.
    """

    state: AttemptState

    def __init__(self, incoming: IncomingState, attempt: ReceiveAttempt) -> None:
        super().__init__(
            attempt.connection, asks=attempt.asks, state=AttemptState.WAITING
        )
        self.incoming = incoming
        self.peer_id: bytes = incoming.peer_id
        self.key: tuple[bytes, bytes] = (incoming.key, incoming.endpoint_id)

    @property
    def waits(self) -> bool:
        """Tell whether no link carries the attempt, so that the next one may."""
        return self.state is AttemptState.WAITING

    def pull(self, connection: ConnectionPort) -> None:
        """Pull again, to tell the producer that all is settled."""
        self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.RESUME]
        self.ask(
            connection,
            key=self.incoming.key,
            priority=0,
            description=self.incoming.description().encode(),
            pull=True,
        )

    def matched(self, connection: ConnectionPort, core: Any) -> None:
        """Answer a producer that pushes again, not having heard that all is settled."""
        self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.RESUME]
        self.connection = connection
        self.core = core
        core.context = self
        answer = self.incoming.description(self.incoming.plan.digest)
        connection.transfers.agree(core, answer.encode())
        self._settle()
        connection.run()

    def agreed(self, description: TransferOffer) -> None:
        self._settle()

    def _settle(self) -> None:
        self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.AGREE]
        self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.SETTLE]

    def event(self, event: TransferEvent) -> None:
        if isinstance(event, SegmentMarked):
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
            self.incoming.registry.notify_again(self)
        else:
            self.incoming.registry.confirmed(self)
