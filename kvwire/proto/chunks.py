"""Payload in flight: the chunks to send, and the places of incoming chunks.

A request's bytes travel as chunks: pieces at multiples of the agreed chunk size, each
in its own frame with its position. So chunks may arrive in any order and cannot
overlap, and a request is complete when its bytes add up.

On a lane several consecutive chunks may travel as one *burst*, with the overhead of a
single chunk.

:mod:`kvwire.proto.scheduler` decides which request sends the next chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from kvwire.errors import IntegrityError, MalformedFrame, UnexpectedFrame, WireCode
from kvwire.limits import REQUESTS_MAX, SPAN_BYTES_MAX
from kvwire.proto.holds import Holds
from kvwire.proto.records import (
    ChunkArrival,
    ChunkPlace,
    ChunkSet,
    RequestRecord,
    SegmentRecord,
)
from kvwire.proto.requests import SENDING, RequestTable
from kvwire.proto.scheduler import Mover, Scheduler
from kvwire.proto.state import RequestInput, RequestKind, RequestStage
from kvwire.types import BufferId
from kvwire.wire.header import FrameType, Header

# The most chunks that one link has not yet reported as sent. For the peer, a get has
# already ended when only this report is missing; so twice REQUESTS_MAX are admitted,
# and no honest peer is refused.
LINK_CHUNKS_MAX: Final = REQUESTS_MAX

_DATA = int(FrameType.DATA)

_BUFFER = ChunkPlace.BUFFER
_READ = RequestKind.READ
_SERVE_READ = RequestKind.SERVE_READ


class Chunk(msgspec.Struct, eq=False):
    """Describes a piece of payload to send: ``length`` bytes from ``offset``.

    Attributes:
        mover: The request, or the segment of a request, that it belongs to.
        request: The request.
        buffer: Its memory.
        position: Its first byte within the mover's bytes.
        offset: Its first byte within the buffer.
        number: The number of its segment; 0 without one.
        lane: The number of the lane that carries it; 0 for the control link.
        index: On a lane: its number among the payloads of that lane.
        quiet: On a lane: whether this side's endpoint no longer needs its memory.
        taken: On a lane: whether it has arrived; None while that is not known.
    """

    mover: Mover
    request: RequestRecord
    buffer: BufferId
    position: int
    offset: int
    length: int
    number: int = 0
    lane: int = 0
    index: int = 0
    quiet: bool = False
    taken: bool | None = None

    @property
    def carries_mark(self) -> bool:
        """Whether its header must carry the segment's mark."""
        mover = self.mover
        return isinstance(mover, SegmentRecord) and mover.unsent_mark is not None


class ChunkMover:
    """Queues, sends and receives the chunks of one connection.

    Attributes:
        sending: Whether there may be a chunk to send.
        on_segment_sent: Called when a link has finished a whole segment.
        on_read_sent: Called when all bytes of a get from a window have left.
    """

    def __init__(self, requests: RequestTable, holds: Holds, chunk_bytes: int) -> None:
        self._requests = requests
        self._holds = holds
        self._chunk_bytes = chunk_bytes
        self._scheduler = Scheduler(chunk_bytes)
        self.sending: bool = False
        self.on_segment_sent: Callable[[SegmentRecord], None] | None = None
        self.on_read_sent: Callable[[RequestRecord], None] | None = None
        # Ordered, so that the core behaves the same in every run.
        self._leaving: dict[Chunk, None] = {}
        # Chunks to send again, because they were lost with their lane.
        self._again: deque[Chunk] = deque()
        self._landing: dict[ChunkArrival, None] = {}

    # --- sending ----------------------------------------------------------------------

    def begin_send(self, request: RequestRecord) -> None:
        """Let a request take turns to send from now on."""
        assert request.kind in SENDING
        assert request.state is RequestStage.MOVING
        self._scheduler.add(request)
        self.sending = len(self._leaving) < LINK_CHUNKS_MAX

    def begin_segment(self, segment: SegmentRecord, priority: int) -> None:
        """Queue a segment for its transfer's turns, behind earlier segments."""
        self._scheduler.add(segment.request, priority, segment)
        self.sending = len(self._leaving) < LINK_CHUNKS_MAX

    @property
    def busy(self) -> bool:
        """Whether some payload has not been sent yet."""
        return bool(self._leaving or self._scheduler.count or self._again)

    def keep(self, chunk: Chunk) -> None:
        """Hold the memory of a chunk that the link has, until ``chunk_sent``."""
        self._holds.take(chunk.buffer)
        chunk.mover.in_flight += 1
        self._leaving[chunk] = None  # bounded: LINK_CHUNKS_MAX, as it is the only one

    @property
    def due_bytes(self) -> int:
        """Return the remaining bytes of the request or segment that sends next."""
        if self._again:
            return self._again[0].length
        mover = self._scheduler.head()
        return 0 if mover is None else mover.nbytes - mover.moved

    def next_chunk(
        self, burst: Callable[[BufferId], int] | None = None, bytes_min: int = 0
    ) -> Chunk | None:
        """Return the next piece; hold its memory until :meth:`chunk_sent`.

        Args:
            burst: Returns how many bytes of a buffer a lane would accept at once, if
                more than one chunk.
            bytes_min: The bytes of the shortest burst.
        """
        if not self.sending:
            return None
        chunk = self._missed_chunk() if self._again else None
        if chunk is None and (mover := self._scheduler.head()) is not None:
            position = mover.moved
            length = min(self._chunk_bytes, mover.nbytes - position)
            if burst is not None and length < mover.nbytes - position:
                nbytes = self._burst(mover, burst)
                length = nbytes if nbytes >= bytes_min else length
            mover.moved += length
            mover.in_flight += 1
            buffer = mover.buffer
            assert buffer is not None
            self._holds.take(buffer)
            at = mover.base + position
            if isinstance(mover, SegmentRecord):
                request = mover.request
                number = mover.number
            else:
                request = mover
                number = 0
            chunk = Chunk(mover, request, buffer, position, at, length, number)
            self._scheduler.sent(length)
        if chunk is not None:
            self._leaving[chunk] = None  # bounded: LINK_CHUNKS_MAX
        more = self._scheduler.count > 0 or bool(self._again)
        self.sending = more and len(self._leaving) < LINK_CHUNKS_MAX
        return chunk

    def chunk_sent(self, chunk: Chunk) -> None:
        """Drop the chunk's hold: the link no longer needs its memory."""
        self._leaving.pop(chunk)
        if len(self._leaving) == LINK_CHUNKS_MAX - 1:
            self._look()
        self._holds.drop(chunk.buffer)
        mover = chunk.mover
        mover.in_flight -= 1
        # A mover is finished once every byte was cut into chunks and no link has a
        # chunk any more; until then, a chunk may come back from a lane and be sent
        # again.
        if (
            chunk.request.state is not RequestStage.MOVING
            or mover.in_flight
            or mover.moved < mover.nbytes
        ):
            return
        if isinstance(mover, SegmentRecord):
            assert self.on_segment_sent is not None
            self.on_segment_sent(mover)
            return
        mover.advance(RequestInput.MOVED)
        if mover.confirmed:
            mover.advance(RequestInput.CONFIRMED)
        if mover.over:
            self._requests.finish(mover)
        elif mover.kind is _SERVE_READ:
            assert self.on_read_sent is not None
            self.on_read_sent(mover)

    def chunk_missed(self, chunk: Chunk) -> None:
        """Queue a chunk that was lost with its lane ahead of all others.

        A burst is sent again as single chunks, which every transport can carry.
        """
        # Before: the chunk holds its buffer. After: the chunk, or each of its parts,
        # still holds the buffer and waits in `_again`; so the buffer never drains in
        # between.
        self._leaving.pop(chunk)
        if chunk.length <= self._chunk_bytes:
            chunk.lane = 0
            self._again.append(chunk)  # bounded: LANE_PAYLOADS_MAX, LANES_MAX
            self._look()
            return
        mover = chunk.mover
        end = chunk.position + chunk.length
        if chunk.request.state is not RequestStage.MOVING:
            end = chunk.position  # it has ended, and its memory is being released
        for position in range(chunk.position, end, self._chunk_bytes):
            part = msgspec.structs.replace(
                chunk,
                position=position,
                offset=mover.base + position,
                length=min(self._chunk_bytes, end - position),
                lane=0,
                quiet=False,
                taken=None,
            )
            self._holds.take(part.buffer)
            mover.in_flight += 1
            self._again.append(part)  # bounded: LANE_PAYLOADS_MAX, LANES_MAX
        mover.in_flight -= 1
        self._holds.drop(chunk.buffer)
        self._look()

    # --- receiving --------------------------------------------------------------------

    def begin_receive(self, request: RequestRecord) -> None:
        """Accept chunks of the request from now on."""
        assert request.kind not in SENDING
        assert request.state is RequestStage.MOVING
        request.arrived = ChunkSet()

    def data_header(self, header: Header) -> ChunkArrival:
        """Return the place for the body of an incoming DATA frame."""
        request = self._requests.find(header.request)
        if request is None:
            return ChunkArrival(ChunkPlace.NOWHERE, header)
        if request.arrived is None or request.state is not RequestStage.MOVING:
            raise UnexpectedFrame(
                "KVW-DT-01",
                f"payload for a {request.kind.value} that is {request.state.value}",
            )
        # Before a byte lands: a second copy must not overwrite checked bytes.
        for number in self.chunk_numbers(header, request.nbytes):
            if not request.arrived.note(number):
                raise UnexpectedFrame("KVW-DT-03", f"chunk {header.offset} came twice")
        assert request.buffer is not None
        return self.land(header, request.buffer, request.base + header.offset, request)

    def chunk_numbers(self, header: Header, nbytes: int) -> range:
        """Return the numbers of the chunks in a payload, from its header."""
        chunk_bytes = self._chunk_bytes
        first, beside = divmod(header.offset, chunk_bytes)
        left = nbytes - header.offset
        length = header.length
        whole = length == left or not length % chunk_bytes
        most = chunk_bytes
        if header.type != _DATA:
            most = max(chunk_bytes, SPAN_BYTES_MAX)
        if beside or left < 1 or length > min(left, most) or not whole:
            raise MalformedFrame(
                "KVW-DT-02",
                f"chunk {header.offset}+{length} of {nbytes} bytes in chunks of "
                f"{chunk_bytes}",
            )
        return range(first, first - (-length // chunk_bytes))

    def land(
        self,
        header: Header,
        buffer: BufferId,
        offset: int,
        request: RequestRecord | None = None,
        segment: SegmentRecord | None = None,
    ) -> ChunkArrival:
        """Hold a buffer for a body that is about to land in it."""
        self._holds.take(buffer)
        arrival = ChunkArrival(_BUFFER, header, buffer, offset, request, segment)
        # One for the control link, which receives one payload at a time.
        self._landing[arrival] = None  # bounded: LANE_PAYLOADS_MAX, LANES_MAX
        return arrival

    def data_landed(self, arrival: ChunkArrival, *, intact: bool) -> None:
        """Count a chunk that has landed, or fail its request if it is damaged."""
        request = arrival.request
        assert request is not None
        # First, even if the request has ended: it drains when this hold is dropped.
        self.release(arrival)
        if request.over:
            return
        if not intact and request.kind is _READ:
            # The owner may have withdrawn blocks; its last frame lists these.
            request.damaged = True
        elif not intact:
            error = IntegrityError(
                f"bytes {arrival.header.offset}+{arrival.length} arrived damaged"
            )
            self._requests.fail(request, error, code=WireCode.INTEGRITY)
            return
        request.moved += arrival.length
        if request.moved < request.nbytes:
            return
        request.advance(RequestInput.MOVED)
        if request.confirmed:
            request.advance(RequestInput.CONFIRMED)
        if request.kind is RequestKind.SERVE_PUT:
            self._requests.send_fin(request)
        if request.kind is not _READ or request.confirmed:
            self._requests.finish(request)

    def release(self, arrival: ChunkArrival) -> None:
        """Drop an arrival's hold, because the link has written all of it."""
        assert arrival.buffer is not None
        self._landing.pop(arrival)
        self._holds.drop(arrival.buffer)

    def missed(self, arrival: ChunkArrival) -> None:
        """Drop an arrival that was lost with its lane and will be sent again."""
        self.release(arrival)
        # Forget the number, or the chunk would count as a duplicate when sent again.
        for number in self.numbers(arrival):
            if arrival.segment is not None:
                arrival.segment.arrived[number] = 0
            else:
                assert arrival.request is not None
                assert arrival.request.arrived is not None
                arrival.request.arrived.forget(number)

    def numbers(self, arrival: ChunkArrival) -> range:
        """Return the numbers of the chunks of an accepted arrival."""
        first = arrival.header.offset // self._chunk_bytes
        return range(first, first - (-arrival.header.length // self._chunk_bytes))

    # --- the end ----------------------------------------------------------------------

    def link_gone(self) -> None:
        """Drop the holds of the control link, which has ended.

        The holds of lanes are dropped when the lanes have ended.
        """
        for chunk in [*(c for c in self._leaving if not c.lane), *self._again]:
            self._leaving.pop(chunk, None)
            chunk.mover.in_flight -= 1
            self._holds.drop(chunk.buffer)
        for arrival in [a for a in self._landing if not a.lane]:
            self.release(arrival)
        self._again.clear()
        self._scheduler.clear()
        self.sending = False

    # --- inside -----------------------------------------------------------------------

    def _burst(self, mover: Mover, burst: Callable[[BufferId], int]) -> int:
        """Return the bytes of a mover's next burst: whole chunks, or the rest."""
        assert mover.buffer is not None
        chunks = max(1, min(burst(mover.buffer), SPAN_BYTES_MAX) // self._chunk_bytes)
        return min(chunks * self._chunk_bytes, mover.nbytes - mover.moved)

    def _missed_chunk(self) -> Chunk | None:
        """Return the next lost chunk that must still be sent."""
        while self._again:
            chunk = self._again.popleft()
            if chunk.request.state is RequestStage.MOVING:
                return chunk
            # The mover has ended meanwhile: drop the hold that the chunk kept while
            # waiting here.
            chunk.mover.in_flight -= 1
            self._holds.drop(chunk.buffer)
        return None

    def _look(self) -> None:
        """Update :attr:`sending`."""
        more = self._scheduler.count > 0 or len(self._again) > 0
        self.sending = more and len(self._leaving) < LINK_CHUNKS_MAX
