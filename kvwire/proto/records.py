"""The parts of a KV transfer as the protocol sees them: numbered, sized, under way.

A segment of one chunk needs no frame of its own to say which part of the cache it is:
its box fits the offset of a header, which is 0 for the first chunk. Such a mark is
*unsaid* until the chunk leaves. What has to come behind it, the mark of a longer
segment or COMMIT, says it by SEGMENT before itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from kvwire.errors import MalformedFrame
from kvwire.proto.events import Outbox
from kvwire.proto.requests import RequestRecord
from kvwire.types import BufferId
from kvwire.wire.control import SegmentBody
from kvwire.wire.header import FrameType, Header

Box = tuple[int, int, int, int, int]
"""(group, layer, layers, granule, granules)"""

# What becomes of a chunk at the consumer.
CHUNK_ARRIVING: Final = 1
CHUNK_LANDED: Final = 2
_COMMIT_MAX: Final = 2


class SegmentRecord(msgspec.Struct, eq=False, kw_only=True):
    """Holds one marked part of a transfer, on either side.

    Attributes:
        request: The transfer.
        number: 1 for the first one marked.
        box: Which part.
        buffer: Its memory; None on the consumer until the front has given it.
        moved: Bytes handed to the link (producer) or verified (consumer).
        in_flight: Chunks the link still works on.
        arrived: Consumer: one byte per chunk, 0 until its header has come.
        damaged: A chunk of it did not match its checksum.
        over: Landed, acknowledged, or damaged: nothing more happens to it.
        unsaid: Producer: what its only chunk says of it; None if SEGMENT has.
    """

    request: RequestRecord
    number: int
    box: Box
    nbytes: int
    buffer: BufferId | None = None
    base: int = 0
    moved: int = 0
    in_flight: int = 0
    arrived: bytearray = msgspec.field(default_factory=bytearray)
    damaged: bool = False
    over: bool = False
    unsaid: int | None = None


class TransferRecord(msgspec.Struct, eq=False, kw_only=True):
    """Holds what a transfer's request keeps beside the request itself.

    Attributes:
        id: The name both applications have given it.
        priority: Chunks of a higher one go first.
        segments: By number.
        open_segments: How many are not over.
        sending_bytes: Producer: of those that the link is not through with.
        in_order: Producer: its chunks leave in the order in which they were marked.
        unsaid: Producer: segments that their chunks have to say, in that order.
        on_sent: Producer: called with each that is sent if no more than
            ``on_sent_bytes`` are left; calls no core.
        committed: COMMIT was sent or received.
        acknowledge: Segments to name in the next SEGMENT_ACK.
        damaged: Segments that arrived damaged; on the producer, once it is told.
    """

    id: bytes
    priority: int = 0
    segments: dict[int, SegmentRecord] = msgspec.field(default_factory=dict)
    open_segments: int = 0
    sending_bytes: int = 0
    in_order: bool = True
    unsaid: dict[SegmentRecord, None] = msgspec.field(default_factory=dict)
    on_sent: Callable[[], None] | None = None
    on_sent_bytes: int = 0
    committed: bool = False
    acknowledge: list[int] = msgspec.field(default_factory=list)
    damaged: list[int] = msgspec.field(default_factory=list)


def packed_mark(box: Box, commit: int) -> int | None:
    """Return a mark as the offset of MARKED_DATA; None if that has no room for it."""
    group, layer, layers, granule, granules = box
    if max(granule, granules) > 0xFFFF or max(layer, layers) > 0xFFF or group > 0x3F:
        return None
    packed = commit << 6 | group
    return packed << 56 | layer << 44 | layers << 32 | granule << 16 | granules


def read_mark(header: Header) -> SegmentBody:
    """Return what MARKED_DATA says of its segment."""
    mark, commit = header.offset, header.offset >> 62
    if commit > _COMMIT_MAX:
        raise MalformedFrame("KVW-TR-13", f"MARKED_DATA with commit {commit}")
    layer, layers = mark >> 44 & 0xFFF, mark >> 32 & 0xFFF
    box = (mark >> 56 & 0x3F, layer, layers, mark >> 16 & 0xFFFF, mark & 0xFFFF)
    number, nbytes = header.segment, header.length
    return SegmentBody(number=number, box=box, nbytes=nbytes, commit=commit)


def say_mark(outbox: Outbox, segment: SegmentRecord, commit: int) -> None:
    """Send the SEGMENT of a segment."""
    body = SegmentBody(
        number=segment.number, box=segment.box, nbytes=segment.nbytes, commit=commit
    )
    outbox.send(FrameType.SEGMENT, body, request=segment.request.wire_id)


def say_marks(outbox: Outbox, transfer: TransferRecord) -> None:
    """Send the SEGMENT of every segment whose mark is unsaid."""
    for segment in transfer.unsaid:
        assert segment.unsaid is not None
        commit = segment.unsaid >> 62
        segment.unsaid = None
        say_mark(outbox, segment, commit)
    transfer.unsaid.clear()
