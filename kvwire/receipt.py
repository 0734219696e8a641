"""An incoming transfer on one connection: its segments get memory, and land."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.description import Description
from kvwire.errors import KVWireError, ProfileMismatch, WireCode
from kvwire.kv.plan import Segment
from kvwire.proto.events import (
    SegmentLanded,
    SegmentMarked,
    TransferCommitted,
    TransferSettled,
)
from kvwire.proto.segments import Segment as CoreSegment
from kvwire.transfer import Attempt, TransferEvent

if TYPE_CHECKING:
    from kvwire.connection import Connection
    from kvwire.incoming import Incoming


class Receipt(Attempt):
    """An incoming transfer on one connection."""

    def __init__(self, incoming: Incoming, connection: Connection) -> None:
        super().__init__(connection)
        self.incoming = incoming
        self.incarnation = connection.peer.incarnation
        self.asked = False
        self.suspended = False
        self.parts: list[tuple[Segment, list[tuple[int, int]]]] = []
        self._segments: dict[int, Segment] = {}

    @property
    def waits(self) -> bool:
        """Whether its link is lost, and has touched memory for the last time."""
        return self.suspended and self.core is None

    def agreed(self, description: Description) -> None:
        """See Attempt."""
        incoming = self.incoming
        self.peer_end = description.end
        try:
            incoming.plan_with(description)
            if description.plan != incoming.plan.digest:
                raise ProfileMismatch(
                    "the two sides would walk the bytes in different orders; their "
                    "versions of kvwire differ",
                    fields=("plan",),
                )
        except KVWireError as exc:
            self.refuse(exc, WireCode.PROFILE)

    def event(self, event: TransferEvent) -> None:
        """See Attempt."""
        if isinstance(event, SegmentMarked):
            core = event.segment
            segment = self.incoming.place(core)
            self._segments[core.number] = segment
            lent = self.incoming.communicator.buffers.lend(
                self.incoming.plan.fragments(segment)
            )
            self.connection.core.transfers.place(core, lent)
        elif isinstance(event, SegmentLanded):
            segment = self._segments[event.segment.number]
            self.incoming.segment_landed(event.segment, segment)
        elif isinstance(event, TransferSettled):
            self.incoming.settled()
        else:
            assert isinstance(event, TransferCommitted)

    def ended(self, error: KVWireError | None) -> None:
        """See Attempt."""
        self.over = True
        if self.incoming.outcome is None:
            self._note_parts()
        self.incoming.receipt_ended(error)

    def chunk_bytes(self) -> int:
        """Bytes of a chunk on this connection."""
        return self.connection.core.agreement.terms.chunk_bytes

    def _note_parts(self) -> None:
        """Note the segments that never became whole, and what of them is missing."""
        if self.core is None:
            return
        segments = self.connection.core.transfers.transfer(self.core).segments
        for number, segment in self._segments.items():
            if not segments[number].over:
                missing = missing_chunks(segments[number], self.chunk_bytes())
                self.parts.append((segment, missing))


def missing_chunks(core: CoreSegment, chunk_bytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the chunks of a segment that have not landed intact."""
    return [
        (index * chunk_bytes, min(chunk_bytes, core.nbytes - index * chunk_bytes))
        for index, state in enumerate(core.arrived)
        if state != 2
    ]
