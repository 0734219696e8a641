"""The core's records of requests, transfers, segments and arriving frames.

Only the parts of the core that own these records change them; events contain them, and
the front refers to them.

A segment with a single chunk needs no SEGMENT to name its part of the cache: the mark
fits into the chunk header's offset field, which would be 0. Such a mark is *unsent*
until the chunk leaves. If a frame that must follow the mark (a longer segment's
SEGMENT, or COMMIT) is due earlier, a SEGMENT is sent for the mark first.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

import msgspec

from kvwire.errors import MalformedFrame, UnexpectedFrame
from kvwire.limits import SEGMENTS_MAX
from kvwire.proto.state import (
    REQUEST_TRANSITIONS,
    TERMINAL,
    RequestInput,
    RequestKind,
    RequestStage,
)
from kvwire.types import BufferId, RegionId, RequestId
from kvwire.wire.control import SegmentBody, WindowGot, WindowOpened
from kvwire.wire.header import Header

Box = tuple[int, int, int, int, int]
"""(group, layer, layers, granule, granules)"""

# The result of a chunk at the consumer.
CHUNK_ARRIVING: Final = 1
CHUNK_LANDED: Final = 2
_COMMIT_MAX: Final = 2
_UNMATCHED: Final = RequestId(0)


class ChunkSet:
    """The set of a request's received chunks; takes no memory if they arrive in order.

    A bitmap's size would depend on the size that the peer announces, before any byte
    has arrived. Here all chunks below ``_next`` have arrived, and each number beyond it
    is kept only for a whole chunk that the peer has sent.
    """

    __slots__ = ("_beyond", "_holes", "_next")

    def __init__(self) -> None:
        self._next = 0
        self._beyond: set[int] = set()
        self._holes: set[int] = set()

    def note(self, number: int) -> bool:
        """Add a chunk; return False if it had arrived before."""
        if number in self._holes:
            self._holes.remove(number)
            return True
        if number < self._next or number in self._beyond:
            return False
        if number > self._next:
            # At most the number of chunks of CHUNK_BYTES_MIN in REQUEST_BYTES_MAX.
            self._beyond.add(number)  # bounded: REQUEST_BYTES_MAX, CHUNK_BYTES_MIN
            return True
        self._next += 1
        while self._next in self._beyond:
            self._beyond.remove(self._next)
            self._next += 1
        return True

    def forget(self, number: int) -> None:
        """Remove a chunk that was lost with its lane, so that it may be sent again."""
        if number in self._beyond:
            self._beyond.remove(number)
        else:
            self._holes.add(number)  # bounded: LANE_PAYLOADS_MAX, LANES_MAX


class RequestRecord(msgspec.Struct, eq=False, kw_only=True):
    """Holds one request: this side's view of a data movement.

    Attributes:
        kind: The kind of request.
        wire_id: Its number on the wire; 0 for a RECV that has no match yet.
        tag: The tag of a message.
        buffer: Its memory; None for a RECV that was posted without memory.
        base: The offset of its first byte within the buffer.
        nbytes: The bytes that it moves; for a posted RECV, the most that it accepts.
        region: The region it works on, for SERVE_PUT and SERVE_GET.
        state: Its state; first the FIRST_STATE of its kind.
        moved: Bytes handed to the link (sending) or verified (receiving).
        in_flight: Frames that the link has not finished.
        arrived: Receiving: the chunks whose headers have arrived.
        confirmed: The peer's FIN arrived before our link had finished its bytes.
        over: Whether it is done or has failed.
        turn_bytes: Bytes that it may still send in this turn; negative if it has sent
            too many.
        answer: The answer from a window's owner: the last frame's body, or all bytes.
        damaged: Whether bytes of a get from a window did not match their checksum.
        on_device: Whether its memory is a device's, which may still be using it. The
            front permits the use, and copies held messages into the memory.
        stays: Whether a RECV remains posted after a small message that found it posted:
            MessageArrived has the bytes. Any other message ends it.
        context: The front's object for the request.
    """

    kind: RequestKind
    wire_id: RequestId = _UNMATCHED
    buffer: BufferId | None
    nbytes: int
    tag: int = 0
    base: int = 0
    region: RegionId | None = None
    deadline: float | None = None
    state: RequestStage
    moved: int = 0
    in_flight: int = 0
    arrived: ChunkSet | None = None
    confirmed: bool = False
    over: bool = False
    turn_bytes: int = 0
    answer: WindowOpened | WindowGot | bytes | memoryview | None = None
    damaged: bool = False
    on_device: bool = False
    stays: bool = False
    context: object = None

    def advance(self, event: RequestInput) -> None:
        """Go to the next state for this input, by REQUEST_TRANSITIONS."""
        new = REQUEST_TRANSITIONS.get((self.kind, self.state, event))
        if new is None:
            raise UnexpectedFrame(
                "KVW-RQ-01",
                f"request {self.wire_id}: {event.value} while a {self.kind.value} is "
                f"{self.state.value}",
            )
        self.state = new
        self.over = new in TERMINAL


class SegmentRecord(msgspec.Struct, eq=False, kw_only=True):
    """Holds one marked part of a transfer, on either side.

    Attributes:
        request: The transfer.
        number: Its number in the order of marks, from 1.
        box: Its part of the cache.
        commit: Producer: above 0 in the last segment; as in SEGMENT.
        buffer: Its memory; None on the consumer until the front has placed it, and on
            the producer if the link took all of it at once.
        moved: Bytes handed to the link (producer) or verified (consumer).
        in_flight: Chunks that the link has not finished.
        arrived: Consumer: one byte per chunk, 0 until its header has arrived.
        damaged: Whether one of its chunks did not match its checksum.
        over: Whether it has ended: landed, acknowledged, or damaged.
        unsent_mark: Producer: the mark that its only chunk will carry; None if SEGMENT
            was sent instead.
    """

    request: RequestRecord
    number: int
    box: Box
    nbytes: int
    commit: int = 0
    buffer: BufferId | None = None
    base: int = 0
    moved: int = 0
    in_flight: int = 0
    arrived: bytearray = msgspec.field(default_factory=bytearray)
    damaged: bool = False
    over: bool = False
    unsent_mark: int | None = None


class TransferRecord(msgspec.Struct, eq=False, kw_only=True):
    """Holds the fields of a request that only transfers have.

    Attributes:
        id: The id that both applications use for it.
        priority: Chunks of a transfer with a higher priority go first.
        segments: Every segment by its number.
        open_segments: The number of segments that are not over.
        sending_bytes: Producer: bytes of the segments that the link has not finished.
        in_order: Producer: whether its chunks leave in the order of the marks.
        unsent_marks: Producer: segments whose chunks will carry their marks, in order.
        on_sent: Producer: called when a segment was sent and no more than
            ``on_sent_bytes`` are left. It must not call the core.
        take: Consumer: called with a newly marked segment of at most
            SMALL_SEGMENT_BYTES and its bytes, or None if they arrived damaged. It
            checks the box before it copies the bytes to their place, and raises
            ProtocolError if the box is wrong. It must not call the core. If it is None,
            each segment is reported first, and the front gives it memory.
        committed: Whether COMMIT was sent or received.
        acknowledge: Segments to name in the next SEGMENT_ACK.
        damaged: Segments that arrived damaged; on the producer, after COMMIT_ACK.
    """

    id: bytes
    priority: int = 0
    segments: dict[int, SegmentRecord] = msgspec.field(default_factory=dict)
    open_segments: int = 0
    sending_bytes: int = 0
    in_order: bool = True
    unsent_marks: dict[SegmentRecord, None] = msgspec.field(default_factory=dict)
    on_sent: Callable[[], None] | None = None
    on_sent_bytes: int = 0
    take: Callable[[SegmentRecord, bytes | memoryview | None], None] | None = None
    committed: bool = False
    acknowledge: list[int] = msgspec.field(default_factory=list)
    damaged: list[int] = msgspec.field(default_factory=list)


class ChunkPlace(enum.Enum):
    """The kinds of places for the body of a frame."""

    CONTROL = "control"
    """The core, which needs the bytes in ``body_received``."""
    HOLD = "hold"
    """New memory, for the buffer that the core has just named."""
    BUFFER = "buffer"
    """``buffer``, from ``offset`` on."""
    WHOLE = "whole"
    """The core, which reports all of the bytes to the front."""
    MARKED = "marked"
    """The result of ``ConnectionCore.marked_place``, once the events are handled."""
    NOWHERE = "nowhere"
    """None: the bytes are dropped, because their request is over."""


class ChunkArrival(msgspec.Struct, eq=False):
    """A frame with an accepted header, whose body is arriving.

    Its payload arrives on the control link, or as payload ``index`` of a lane.
    """

    place: ChunkPlace
    header: Header
    buffer: BufferId | None = None
    offset: int = 0
    request: RequestRecord | None = None
    segment: SegmentRecord | None = None
    raw: bytes = b""
    lane: int = 0
    index: int = 0

    @property
    def length(self) -> int:
        """Return the bytes of the body."""
        return self.header.length


def packed_mark(box: Box, commit: int) -> int | None:
    """Return a mark as the offset of MARKED_DATA; None if it does not fit."""
    group, layer, layers, granule, granules = box
    if max(granule, granules) > 0xFFFF or max(layer, layers) > 0xFFF or group > 0x3F:
        return None
    packed = commit << 6 | group
    return packed << 56 | layer << 44 | layers << 32 | granule << 16 | granules


def read_mark(header: Header) -> SegmentBody:
    """Return the mark in a MARKED_DATA header, as the body of a SEGMENT."""
    mark = header.offset
    commit = header.offset >> 62
    if commit > _COMMIT_MAX:
        raise MalformedFrame("KVW-TR-13", f"MARKED_DATA with commit {commit}")
    number = header.segment
    if number > SEGMENTS_MAX:
        raise MalformedFrame("KVW-TR-13", f"MARKED_DATA of segment {number}")
    layer = mark >> 44 & 0xFFF
    layers = mark >> 32 & 0xFFF
    box = (mark >> 56 & 0x3F, layer, layers, mark >> 16 & 0xFFFF, mark & 0xFFFF)
    nbytes = header.length
    return SegmentBody(number=number, box=box, nbytes=nbytes, commit=commit)
