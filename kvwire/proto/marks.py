"""What a segment is, said by SEGMENT or by the header of its only chunk.

A segment of one chunk needs no frame of its own to say which part of the cache it is:
its box fits the offset of a header, which is 0 for the first chunk. Such a mark is
*unsaid* until the chunk leaves. What has to come behind it, the mark of a longer
segment or COMMIT, says it by SEGMENT before itself.
"""

from __future__ import annotations

from typing import Final

from kvwire.errors import MalformedFrame
from kvwire.proto.outbox import Outbox
from kvwire.proto.records import Box, SegmentRecord, TransferRecord
from kvwire.wire.control import SegmentBody
from kvwire.wire.header import FrameType, Header

_COMMIT_MAX: Final = 2


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
    number, nbytes, wire_id = segment.number, segment.nbytes, segment.request.wire_id
    body = SegmentBody(number=number, box=segment.box, nbytes=nbytes, commit=commit)
    assert wire_id is not None
    outbox.send(FrameType.SEGMENT, body, request=wire_id)


def say_marks(outbox: Outbox, transfer: TransferRecord) -> None:
    """Send the SEGMENT of every segment whose mark is unsaid."""
    for segment in transfer.unsaid:
        assert segment.unsaid is not None
        commit = segment.unsaid >> 62
        segment.unsaid = None
        say_mark(outbox, segment, commit)
    transfer.unsaid.clear()
