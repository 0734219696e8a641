"""An incoming transfer on one connection: its segments get memory, and land."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvwire.backend import Payload
from kvwire.errors import (
    KVWireError,
    PeerCancelled,
    ProtocolError,
    UsageError,
    WireCode,
)
from kvwire.kv.landed import Landed
from kvwire.kv.plan import Segment
from kvwire.limits import SEGMENT_BYTES_MAX
from kvwire.memory.iovec import simplest
from kvwire.proto.events import (
    SegmentLanded,
    SegmentMarked,
    TransferSettled,
)
from kvwire.proto.records import CHUNK_LANDED, SegmentRecord
from kvwire.transfers.base import UNMARKED, Attempt, TransferEvent
from kvwire.transfers.description import TransferOffer
from kvwire.transfers.ports import ConnectionPort
from kvwire.transfers.state import ATTEMPT_TRANSITIONS, AttemptInput, AttemptState

if TYPE_CHECKING:
    from kvwire.transfers.incoming import IncomingState


class ReceiveAttempt(Attempt):
    """Receives an incoming transfer on one connection."""

    state: AttemptState

    def __init__(
        self, incoming: IncomingState, connection: ConnectionPort, *, asks: bool
    ) -> None:
        super().__init__(connection, asks=asks)
        self.incoming = incoming
        self._segments: dict[int, Segment] = {}
        # How many of them are on their way.
        self._under_way = 0
        # What was marked or had landed; None until the two sides agree.
        self._promised: Landed | None = None

    def begin(self) -> None:
        """Expect what the plan has, less what was reported as landed."""
        self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.AGREE]
        self._promised = Landed(self.incoming.plan)
        for segment in self.incoming.reported:
            self._promised.mark(segment)

    def agreed(self, description: TransferOffer) -> None:
        incoming = self.incoming
        try:
            incoming.plan_with(description)
            description.require_same_plan(incoming.plan.digest)
        except KVWireError as exc:
            self.refuse(exc, WireCode.PROFILE)
            return
        self.begin()

    def event(self, event: TransferEvent) -> None:
        incoming = self.incoming
        if isinstance(event, SegmentMarked):
            core, plan = event.segment, incoming.plan
            segment = self._checked(core)
            self._segments[core.number] = segment  # bounded: SEGMENTS_MAX
            if not self._under_way:
                incoming.phases.enter("wire")
            self._under_way += 1
            incoming.has_moved = True
            incoming.layers_grouped = max(incoming.layers_grouped, segment.layers)
            memory: Payload = plan.fragments(segment)
            transfers = self.connection.transfers
            if transfers.only_link:  # lanes know memory by its owner
                memory = simplest(memory)
            transfers.place(core, incoming.lend(memory))
        elif isinstance(event, SegmentLanded):
            segment = self._segments[event.segment.number]
            self._under_way -= 1
            if not self._under_way:
                incoming.phases.enter("mark_wait")
            incoming.segment_landed(event.segment, segment)
        else:
            assert isinstance(event, TransferSettled)
            self.state = ATTEMPT_TRANSITIONS[self.state, AttemptInput.SETTLE]
            incoming.end(PeerCancelled(UNMARKED))

    def ended(self, error: KVWireError | None) -> None:
        if self.incoming.outcome is None:
            self._note_parts()
        self.incoming.attempt_ended(error)
        if self.state is AttemptState.OVER or self.core is None:
            # Each names the other; else only the garbage collector would end both.
            del self.incoming

    @property
    def marked_layers(self) -> int:
        """Return how many layers the producer has marked, as far as is known here."""
        return 0 if self._promised is None else self._promised.layers

    def chunk_bytes(self) -> int:
        """Return the bytes of a chunk on this connection."""
        return self.connection.chunk_bytes

    def _checked(self, core: SegmentRecord) -> Segment:
        """Return what of the plan a marked segment is."""
        plan, segment = self.incoming.plan, tuple.__new__(Segment, core.box)
        try:
            nbytes = plan.check(segment)
        except UsageError as exc:
            raise ProtocolError("KVW-TR-09", str(exc)) from None
        if core.nbytes != nbytes:
            raise ProtocolError(
                "KVW-TR-09",
                f"segment {core.number} of {core.nbytes} bytes, the plan has {nbytes}",
            )
        if segment.granules > 1 and core.nbytes > SEGMENT_BYTES_MAX:
            raise ProtocolError(
                "KVW-TR-12",
                f"segment {core.number}: {core.nbytes} bytes of {segment.granules} "
                f"granules; {SEGMENT_BYTES_MAX} are the most of more than one",
            )
        assert self._promised is not None
        if not self._promised.claim(segment):
            raise ProtocolError(
                "KVW-TR-11", f"segment {core.number}: part of it was marked before"
            )
        return segment

    def _note_parts(self) -> None:
        """Note the parts that are here of segments that never became whole."""
        if self.core is None or not self._segments:
            return
        segments = self.connection.transfers.records[self.core].segments
        landed = self.incoming.landed
        for number, segment in self._segments.items():
            if not segments[number].over:
                before = landed.left
                missing = missing_chunks(segments[number], self.chunk_bytes())
                landed.mark_but(segment, missing)
                if landed.left < before:
                    self.incoming.renew_lease()


def missing_chunks(core: SegmentRecord, chunk_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of each run of a segment's chunks that have not landed."""
    count = -(-core.nbytes // chunk_bytes)
    landed = np.ones(count + 2, np.bool_)
    landed[1:-1] = np.frombuffer(core.arrived or bytes(count), np.uint8) == CHUNK_LANDED
    edges = np.flatnonzero(landed[1:] != landed[:-1]) * chunk_bytes
    ends = np.minimum(edges, core.nbytes).tolist()
    return [
        (first, end - first) for first, end in zip(ends[::2], ends[1::2], strict=True)
    ]
