"""KV transfers: a request whose bytes are marked, moved and landed segment by segment.

The order of the frames is documented in ``docs/topics/protocol-kv-transfers.md``. A
*description* describes one side's cache and blocks; the core transmits it without
reading it. A *box* consists of five numbers that name a part of the canonical byte
order; the front checks them against its plan before it gives the segment memory.
Segments are numbered from 1 in the order of their marks, and their chunks may arrive in
any order.

SEGMENT always precedes the segment's DATA on the same link, COMMIT follows every
SEGMENT, and COMMIT_ACK is only sent when every marked segment has landed or was found
damaged. So a producer that has received COMMIT_ACK knows exactly which segments the
consumer has, and a consumer never mistakes a part of a transfer for the whole.
"""

from __future__ import annotations

import msgspec

from kvwire.errors import (
    FlowControlViolation,
    IntegrityError,
    MalformedFrame,
    UnexpectedFrame,
    UsageError,
    WireCode,
)
from kvwire.limits import (
    LANDED_MAX,
    LAST_FINS_MAX,
    SEGMENTS_TOGETHER,
    SETTLED_MAX,
    SMALL_SEGMENT_BYTES,
    TRANSFERS_WAITING_MAX,
)
from kvwire.proto.chunks import Chunk, ChunkMover
from kvwire.proto.events import (
    Outbox,
    SegmentLanded,
    SegmentMarked,
    SegmentsAcknowledged,
    TransferAgreed,
    TransferOpened,
    TransferSettled,
)
from kvwire.proto.holds import Holds
from kvwire.proto.records import (
    CHUNK_ARRIVING,
    CHUNK_LANDED,
    Box,
    ChunkArrival,
    ChunkPlace,
    RequestRecord,
    SegmentRecord,
    TransferRecord,
    packed_mark,
    read_mark,
)
from kvwire.proto.requests import RequestTable
from kvwire.proto.state import RequestInput, RequestKind, RequestStage
from kvwire.types import BufferId
from kvwire.wire.control import (
    Agree,
    Commit,
    CommitAck,
    Fin,
    Open,
    SegmentAck,
    SegmentBody,
)
from kvwire.wire.header import FrameType, Header

_DATA = int(FrameType.DATA)
_MARKED_DATA = int(FrameType.MARKED_DATA)
_INCOMING = RequestKind.INCOMING
_MARKED = ChunkPlace.MARKED
_WHOLE = ChunkPlace.WHOLE
_MOVING = RequestStage.MOVING
# The buffer of a chunk whose memory is not in the table of holds yet.
_NO_BUFFER = BufferId(0)


class Transfers:
    """Runs both sides' KV transfers on one connection.

    Attributes:
        last_fins: Requests whose FIN is held back, to be sent in the next OPEN or
            AGREE.
        only_link: Whether all payload goes over the control link.
        unacknowledged: Requests whose landed segments :meth:`acknowledge` names.
        unhurried: Requests whose landed segments are reported with later ones, or by
            :meth:`speak`.
        records: The record of each transfer until :meth:`forget`.
    """

    def __init__(
        self,
        outbox: Outbox,
        requests: RequestTable,
        chunks: ChunkMover,
        holds: Holds,
        chunk_bytes: int,
    ) -> None:
        self._outbox = outbox
        self._requests = requests
        self._chunks = chunks
        self._holds = holds
        self._chunk_bytes = chunk_bytes
        # Payload headers are never sealed, so they contain no marks if frames are
        # sealed.
        self._sealed = outbox.framing.sealed
        self.only_link: bool = True
        self.last_fins: list[int] = []
        self.records: dict[RequestRecord, TransferRecord] = {}
        # Ordered sets.
        self._asked: dict[RequestRecord, None] = {}
        self._unanswered: dict[RequestRecord, None] = {}
        self.unacknowledged: dict[RequestRecord, None] = {}
        self.unhurried: dict[RequestRecord, None] = {}
        chunks.on_segment_sent = self.sent

    # --- meeting ----------------------------------------------------------------------

    def open(
        self, request: RequestRecord, transfer: TransferRecord, description: bytes
    ) -> None:
        """Send OPEN; the transfer then waits for the peer's answer."""
        if len(self._asked) >= TRANSFERS_WAITING_MAX and not _room(self._asked):
            raise UsageError(
                f"{TRANSFERS_WAITING_MAX} transfers wait for this peer's answer, "
                "which is the limit; wait for some of them"
            )
        self._requests.start(request)
        self._asked[request] = None  # bounded: TRANSFERS_WAITING_MAX
        self.records[request] = transfer  # bounded: REQUESTS_MAX
        body = Open(
            id=transfer.id,
            pull=request.kind is RequestKind.INCOMING,
            priority=transfer.priority,
            description=description,
            done=self._take_last_fins() if self.last_fins else (),
        )
        self._outbox.send(FrameType.OPEN, body, request=request.wire_id)

    def agree(self, request: RequestRecord, description: bytes) -> None:
        """Send AGREE to the peer's OPEN; from now on segments move."""
        if request.over:
            return
        self._unanswered.pop(request, None)
        request.advance(RequestInput.GO)
        body = Agree(description=description, done=self._take_last_fins())
        self._outbox.send(FrameType.AGREE, body, request=request.wire_id)

    def opened(self, header: Header, body: Open) -> None:
        """Handle OPEN: the peer requests a transfer."""
        if body.done:
            self._confirm(body.done)
        wire_id = self._requests.admit(header.request)
        waiting = self._unanswered
        if len(waiting) >= TRANSFERS_WAITING_MAX and not _room(waiting):
            raise FlowControlViolation(
                "KVW-TR-01",
                f"more than {TRANSFERS_WAITING_MAX} transfers wait for an answer",
            )
        request = RequestRecord(
            kind=RequestKind.OUTGOING if body.pull else RequestKind.INCOMING,
            wire_id=wire_id,
            buffer=None,
            nbytes=0,
            state=RequestStage.POSTED,
        )
        self._requests.serve(request)
        transfer = TransferRecord(id=body.id, priority=body.priority)
        self.records[request] = transfer  # bounded: REQUESTS_MAX
        self._unanswered[request] = None  # bounded: TRANSFERS_WAITING_MAX
        self._outbox.report(
            TransferOpened(request=request, id=body.id, description=body.description)
        )

    def agreed(self, header: Header, body: Agree) -> None:
        """Handle AGREE, the peer's answer to our OPEN."""
        if body.done:
            self._confirm(body.done)
        request = self._find(header, RequestKind.OUTGOING, RequestKind.INCOMING)
        if request is None:
            return
        if request in self._unanswered:
            raise UnexpectedFrame(
                "KVW-TR-02", "AGREE to a transfer that the peer itself opened"
            )
        request.advance(RequestInput.GO)
        self._outbox.report(
            TransferAgreed(request=request, description=body.description)
        )

    # --- the producer -----------------------------------------------------------------

    def mark(
        self, request: RequestRecord, box: Box, nbytes: int, commit: int = 0
    ) -> SegmentRecord:
        """Mark a part of the cache as final, and queue it.

        Then send it: by :meth:`queue`; or on the control link by :meth:`leave`, if its
        mark is *unsent* and no other chunks are waiting.

        Args:
            request: The transfer.
            box: The part's box.
            nbytes: The part's bytes.
            commit: As in SEGMENT: above 0, this is the last segment.
        """
        transfer = self.records[request]
        assert request.state is _MOVING
        assert not transfer.committed
        number = len(transfer.segments) + 1
        segment = SegmentRecord(
            request=request, number=number, box=box, nbytes=nbytes, commit=commit
        )
        if transfer.in_order and not self._sealed and nbytes <= self._chunk_bytes:
            segment.unsent_mark = packed_mark(box, commit)
        transfer.segments[number] = segment  # bounded: SEGMENTS_MAX
        transfer.open_segments += 1
        transfer.committed = commit > 0
        return segment

    def queue(self, segment: SegmentRecord, buffer: BufferId) -> None:
        """Let a newly marked segment take turns to send."""
        # Before: `unsent_marks` has, in order, the latest segments without a SEGMENT.
        # After: either this segment is the last of them, or SEGMENT was sent for
        # all and none is left. So marks reach the consumer in the order of their
        # numbers.
        transfer = self.records[segment.request]
        segment.buffer = buffer
        if segment.unsent_mark is not None and self.only_link:
            transfer.unsent_marks[segment] = None  # bounded: SEGMENTS_MAX
        else:
            segment.unsent_mark = None
            _send_marks(self._outbox, transfer)
            _send_mark(self._outbox, segment)
        transfer.sending_bytes += segment.nbytes
        self._chunks.begin_segment(segment, transfer.priority)

    def leave(self, segment: SegmentRecord, check: int | None) -> tuple[Chunk, bytes]:
        """Return the only chunk of a newly marked segment, and its header.

        It has to be the next frame behind those that are due, so no chunk may be
        queued. If the link takes all of it at once, or a copy, call :meth:`settle`,
        otherwise :meth:`keep`.
        """
        request = segment.request
        number = segment.number
        nbytes = segment.nbytes
        mark = segment.unsent_mark
        assert mark is not None
        segment.unsent_mark = None
        segment.moved = nbytes
        header = self._outbox.framing.payload(
            _MARKED_DATA, nbytes, request.wire_id, number, mark, check
        )
        return Chunk(segment, request, _NO_BUFFER, 0, 0, nbytes, number), header

    def keep(self, chunk: Chunk, buffer: BufferId) -> None:
        """Hold the memory of a chunk that has left, until ``chunk_sent``."""
        segment = chunk.mover
        assert isinstance(segment, SegmentRecord)
        segment.buffer = chunk.buffer = buffer
        self.records[chunk.request].sending_bytes += segment.nbytes
        self._chunks.keep(chunk)

    def sent(self, segment: SegmentRecord) -> None:
        """Record that the link has sent a segment."""
        transfer = self.records[segment.request]
        transfer.sending_bytes -= segment.nbytes
        on_sent = transfer.on_sent
        if on_sent is not None and transfer.sending_bytes <= transfer.on_sent_bytes:
            on_sent()
        if transfer.committed and not transfer.sending_bytes:
            self.settle(segment.request)

    def commit(self, request: RequestRecord, *, complete: bool) -> None:
        """Send COMMIT: no more marks follow; ``complete`` if everything was marked."""
        transfer = self.records[request]
        transfer.committed = True
        _send_marks(self._outbox, transfer)
        body = Commit(segments=len(transfer.segments), complete=complete)
        self._outbox.send(FrameType.COMMIT, body, request=request.wire_id)
        self.settle(request)

    def take_mark(self, segment: SegmentRecord) -> int:
        """Return a segment's mark for its only chunk's header; it counts as sent."""
        mark = segment.unsent_mark
        assert mark is not None
        segment.unsent_mark = None
        del self.records[segment.request].unsent_marks[segment]
        return mark

    def landed_received(self, header: Header, body: SegmentAck) -> None:
        """Handle SEGMENT_ACK: the consumer has the listed segments."""
        request = self._find(header, RequestKind.OUTGOING)
        if request is None:
            return
        transfer = self.records[request]
        for number in body.segments:
            segment = transfer.segments.get(number)
            if segment is None or segment.over or segment.moved < segment.nbytes:
                raise UnexpectedFrame(
                    "KVW-TR-05",
                    f"SEGMENT_ACK for segment {number}, which was not all sent",
                )
            segment.over = True
            transfer.open_segments -= 1
        self._outbox.report(
            SegmentsAcknowledged(request=request, numbers=body.segments)
        )

    def settled(self, header: Header, body: CommitAck) -> None:
        """Handle COMMIT_ACK: all segments have landed, except the listed ones."""
        request = self._find(header, RequestKind.OUTGOING)
        if request is None:
            return
        transfer = self.records[request]
        # Before: some segments are open. After: all are over, and `damaged` has those
        # that COMMIT_ACK names. It may name only segments that were sent completely and
        # not acknowledged, so a peer cannot make memory count as landed or lost twice.
        known = transfer.committed and not request.confirmed
        damaged: list[int] = []
        landed: list[int] = []
        for number, segment in transfer.segments.items():
            if not segment.over:
                (damaged if number in body.damaged else landed).append(number)
                known = known and segment.moved == segment.nbytes
        if not known or sorted(body.damaged) != damaged:
            raise UnexpectedFrame(
                "KVW-TR-06", "COMMIT_ACK for a transfer with segments in flight"
            )
        for number in damaged:
            transfer.segments[number].damaged = True
        for number in (*damaged, *landed):
            transfer.segments[number].over = True
        transfer.open_segments = 0
        transfer.damaged = damaged
        request.confirmed = True
        self.last_fins.append(request.wire_id)  # bounded: LAST_FINS_MAX
        if len(self.last_fins) == LAST_FINS_MAX:
            self.send_last_fins()
        self.settle(request)
        if landed and not request.over:  # otherwise the request's end reports it
            self._outbox.report(
                SegmentsAcknowledged(request=request, numbers=tuple(landed))
            )

    def settle(self, request: RequestRecord) -> None:
        """Move a committed transfer on, once the link has finished its segments."""
        transfer = self.records[request]
        if not transfer.committed or transfer.sending_bytes:
            return
        if request.state is RequestStage.MOVING:
            request.advance(RequestInput.MOVED)
        if request.confirmed and request.state is RequestStage.WAITING:
            request.advance(RequestInput.CONFIRMED)
            self._requests.finish(request)

    # --- the consumer -----------------------------------------------------------------

    def marked(self, header: Header, body: SegmentBody) -> SegmentRecord | None:
        """Handle SEGMENT: report the segment, so that the front gives it memory.

        Returns None if the transfer is over.
        """
        request = self._requests.find(header.request)
        if request is None:
            return None
        segment = self._mark(header, body, request)
        self._outbox.report(SegmentMarked(segment=segment))
        return segment

    def _mark(
        self, header: Header, body: SegmentBody, request: RequestRecord
    ) -> SegmentRecord:
        """Check and record a segment that the producer has marked."""
        if request.kind is not _INCOMING:
            raise _wrong_kind(header, request)
        transfer = self.records[request]
        # Consecutive numbers, together with COMMIT's count, show that no mark was lost.
        due = len(transfer.segments) + 1
        if (
            request.state is not _MOVING
            or transfer.committed
            # its type, or `read_mark`, bounds the number, and so `due`
            or body.number != due
        ):
            raise UnexpectedFrame(
                "KVW-TR-03",
                f"SEGMENT of segment {body.number} where {due} was due, in a transfer "
                f"that is {request.state.value}",
            )
        segment = SegmentRecord(
            request=request, number=body.number, box=body.box, nbytes=body.nbytes
        )
        transfer.segments[due] = segment  # bounded: SEGMENTS_MAX
        transfer.open_segments += 1
        transfer.committed = body.commit > 0
        return segment

    def marked_data(self, header: Header) -> ChunkArrival:
        """Handle the header of MARKED_DATA, which is a SEGMENT and its only DATA."""
        if self._sealed:
            raise UnexpectedFrame("KVW-TR-13", "MARKED_DATA on this connection")
        if header.length > self._chunk_bytes:
            raise MalformedFrame(
                "KVW-DT-02",
                f"a chunk of {header.length} bytes, of at most {self._chunk_bytes}",
            )
        request = self._requests.find(header.request)
        transfer = None if request is None else self.records.get(request)
        if (
            transfer is not None
            and transfer.take is not None
            and header.length <= SMALL_SEGMENT_BYTES
        ):
            return ChunkArrival(_WHOLE, header)
        segment = self.marked(header, read_mark(header))
        place = ChunkPlace.NOWHERE if segment is None else _MARKED
        plain = msgspec.structs.replace(header, type=_DATA, offset=0)
        return ChunkArrival(place, plain, segment=segment)

    def marked_place(self, arrival: ChunkArrival) -> ChunkArrival:
        """Return the place for the body of MARKED_DATA, after the front placed it."""
        segment = arrival.segment
        assert segment is not None
        if self._outbox.shut or segment.request.over:
            return ChunkArrival(ChunkPlace.NOWHERE, arrival.header)
        assert segment.buffer is not None, "the front has not placed a segment"
        segment.arrived[0] = CHUNK_ARRIVING
        return self._chunks.land(arrival.header, segment.buffer, 0, segment=segment)

    def marked_whole(
        self, header: Header, body: bytes | memoryview, *, intact: bool
    ) -> None:
        """Handle a small MARKED_DATA, of which all bytes are here."""
        request = self._requests.find(header.request)
        if request is None or self._outbox.shut:
            return
        segment = self._mark(header, read_mark(header), request)
        transfer = self.records[request]
        assert transfer.take is not None
        transfer.take(segment, body if intact else None)
        segment.moved = segment.nbytes
        segment.damaged = not intact
        self._segment_over(segment, transfer)

    def place(self, segment: SegmentRecord, buffer: BufferId) -> None:
        """Give a marked segment memory."""
        if segment.request.over:
            self._holds.retire(buffer)
            return
        segment.buffer = buffer
        # The length comes from our own plan, which the front has compared: no
        # allocation depends on a peer's number.
        segment.arrived = bytearray(-(-segment.nbytes // self._chunk_bytes))

    def committed(self, header: Header, body: Commit) -> None:
        """Handle COMMIT: no more marks follow."""
        request = self._find(header, RequestKind.INCOMING)
        if request is None:
            return
        transfer = self.records[request]
        if (
            request.state is not RequestStage.MOVING
            or transfer.committed
            or body.segments != len(transfer.segments)
        ):
            raise UnexpectedFrame(
                "KVW-TR-04",
                f"COMMIT of {body.segments} segments; {len(transfer.segments)} were "
                f"marked",
            )
        transfer.committed = True
        # COMMIT may overtake chunks on lanes, so the end waits for every marked
        # segment.
        if not transfer.open_segments:
            self._finish_incoming(request, transfer)

    def confirmed(self, request: RequestRecord) -> None:
        """Handle FIN: the producer has our COMMIT_ACK."""
        request.advance(RequestInput.CONFIRMED)
        self._requests.finish(request)

    def data_header(self, header: Header) -> ChunkArrival:
        """Return the place for the body of a segment's DATA."""
        request = self._requests.find(header.request)
        if request is None:
            return ChunkArrival(ChunkPlace.NOWHERE, header)
        transfer = self.records.get(request)
        segment = transfer.segments.get(header.segment) if transfer else None
        if request.kind is not _INCOMING or segment is None or segment.buffer is None:
            raise UnexpectedFrame(
                "KVW-TR-07",
                f"payload for segment {header.segment}, which was not marked",
            )
        numbers = self._chunks.chunk_numbers(header, segment.nbytes)
        for number in numbers:
            if segment.arrived[number]:
                raise UnexpectedFrame("KVW-DT-03", f"chunk {header.offset} came twice")
            segment.arrived[number] = CHUNK_ARRIVING
        return self._chunks.land(header, segment.buffer, header.offset, segment=segment)

    def data_landed(self, arrival: ChunkArrival, *, intact: bool) -> None:
        """Count a chunk of a segment that has landed, or mark the segment damaged."""
        # Before: the arrival holds the buffer. After: it does not; and if all bytes of
        # the segment are here, the segment is over: acknowledged if intact, otherwise
        # listed in COMMIT_ACK.
        segment = arrival.segment
        assert segment is not None
        # First, even if the transfer has ended: its memory drains when this hold is
        # dropped.
        self._chunks.release(arrival)
        request = segment.request
        if request.over:
            return
        segment.moved += arrival.header.length
        if not intact:
            segment.damaged = True
        elif segment.damaged or segment.moved < segment.nbytes:
            # Not for a complete segment, since its chunks are not read any more.
            for number in self._chunks.numbers(arrival):
                segment.arrived[number] = CHUNK_LANDED
        if segment.moved < segment.nbytes:
            return
        self._outbox.report(SegmentLanded(segment=segment))
        self._segment_over(segment, self.records[request])

    def _segment_over(self, segment: SegmentRecord, transfer: TransferRecord) -> None:
        """Acknowledge a segment of which all bytes are here, now or later."""
        request = segment.request
        segment.over = True
        transfer.open_segments -= 1
        # A damaged segment is never acknowledged; COMMIT_ACK names it.
        if segment.damaged:
            transfer.damaged.append(segment.number)  # bounded: SEGMENTS_MAX
        else:
            transfer.acknowledge.append(segment.number)  # bounded: SEGMENTS_MAX
            request.nbytes += segment.nbytes
        if transfer.committed and not transfer.open_segments:
            self._finish_incoming(request, transfer)
        elif not segment.damaged:
            late = len(transfer.acknowledge) < SEGMENTS_TOGETHER
            due = self.unhurried if late else self.unacknowledged
            due[request] = None  # bounded: REQUESTS_MAX

    def acknowledge(self) -> None:
        """Send SEGMENT_ACK for the segments that have landed since the last one."""
        for request in self.unacknowledged:
            self._send_landed(request, self.records[request])
        self.unacknowledged.clear()

    # --- both -------------------------------------------------------------------------

    def speak(self) -> None:
        """Send every FIN and SEGMENT_ACK that was held back."""
        self.send_last_fins()
        self.unacknowledged |= self.unhurried
        self.unhurried.clear()
        self.acknowledge()

    def send_last_fins(self) -> None:
        """Send each FIN that was held back in its own frame."""
        for wire_id in self._take_last_fins():
            self._outbox.send(FrameType.FIN, Fin(nbytes=0), request=wire_id)

    def _take_last_fins(self) -> tuple[int, ...]:
        taken = tuple(self.last_fins)
        self.last_fins = []
        return taken

    def _confirm(self, done: tuple[int, ...]) -> None:
        """End the transfers in the ``done`` field of OPEN or AGREE, as FIN would."""
        for wire_id in done:
            request = self._requests.find(wire_id)
            if request is None:
                continue
            if request.kind is not RequestKind.INCOMING:
                raise UnexpectedFrame(
                    "KVW-TR-08", f"`done` names a {request.kind.value}"
                )
            self.confirmed(request)

    @property
    def unanswered(self) -> list[RequestRecord]:
        """Return the peer's transfers that wait for this side's answer."""
        return [request for request in self._unanswered if not request.over]

    def forget(self, request: RequestRecord) -> list[BufferId]:
        """Remove an ended transfer; retire and return its buffers."""
        assert request.over
        buffers = self.retire(request)
        self.records.pop(request, None)
        self._asked.pop(request, None)
        self._unanswered.pop(request, None)
        self.unacknowledged.pop(request, None)
        self.unhurried.pop(request, None)
        return buffers

    def retire(self, request: RequestRecord) -> list[BufferId]:
        """Retire the buffers of a transfer that no longer needs them; return them."""
        transfer = self.records.get(request)
        segments = () if transfer is None else transfer.segments.values()
        buffers = [s.buffer for s in segments if s.buffer is not None]
        if buffers:
            self._holds.retire(*buffers)
        return buffers

    def _find(self, header: Header, *kinds: RequestKind) -> RequestRecord | None:
        request = self._requests.find(header.request)
        if request is not None and request.kind not in kinds:
            raise _wrong_kind(header, request)
        return request

    def _send_landed(self, request: RequestRecord, transfer: TransferRecord) -> None:
        numbers = transfer.acknowledge
        for start in range(0, len(numbers), LANDED_MAX):
            body = SegmentAck(segments=tuple(numbers[start : start + LANDED_MAX]))
            self._outbox.send(FrameType.SEGMENT_ACK, body, request=request.wire_id)
        transfer.acknowledge = []

    def _finish_incoming(
        self, request: RequestRecord, transfer: TransferRecord
    ) -> None:
        """Send COMMIT_ACK, because no marked segment is in flight any more."""
        transfer.acknowledge = []  # COMMIT_ACK reports these segments
        if len(transfer.damaged) > SETTLED_MAX:
            error = IntegrityError(f"{len(transfer.damaged)} segments arrived damaged")
            self._requests.fail(request, error, code=WireCode.INTEGRITY)
            return
        body = CommitAck(damaged=tuple(sorted(transfer.damaged)))
        self._outbox.send(FrameType.COMMIT_ACK, body, request=request.wire_id)
        request.advance(RequestInput.MOVED)
        self._outbox.report(TransferSettled(request=request))


def _send_mark(outbox: Outbox, segment: SegmentRecord) -> None:
    """Send SEGMENT for a segment."""
    body = SegmentBody(
        number=segment.number,
        box=segment.box,
        nbytes=segment.nbytes,
        commit=segment.commit,
    )
    outbox.send(FrameType.SEGMENT, body, request=segment.request.wire_id)


def _send_marks(outbox: Outbox, transfer: TransferRecord) -> None:
    """Send SEGMENT for every segment whose mark was not sent yet."""
    for segment in transfer.unsent_marks:
        segment.unsent_mark = None
        _send_mark(outbox, segment)
    transfer.unsent_marks.clear()


def _wrong_kind(header: Header, request: RequestRecord) -> UnexpectedFrame:
    name = FrameType(header.type).name
    return UnexpectedFrame("KVW-TR-08", f"{name} for a {request.kind.value}")


def _room(waiting: dict[RequestRecord, None]) -> bool:
    """Return whether one more transfer may wait, after removing moving ones."""
    for request in list(waiting):
        if request.state is not RequestStage.POSTED:
            del waiting[request]
    return len(waiting) < TRANSFERS_WAITING_MAX
