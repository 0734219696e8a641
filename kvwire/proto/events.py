"""What the core tells its front, in the order in which it happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import ConnectionClosed, KVWireError
from kvwire.types import BufferId

if TYPE_CHECKING:
    from kvwire.proto.requests import Request
    from kvwire.proto.segments import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDone:
    """A request is over; said exactly once for each request.

    Attributes:
        request: Which one.
        error: Why it failed, or None.
        nbytes: Bytes moved, if it did not fail.
        held: For a RECV whose message had to be held: the buffer the message is in.
            The front copies or hands it out, and forgets the buffer.
    """

    request: Request
    error: KVWireError | None
    nbytes: int
    held: BufferId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWanted:
    """A RECV without memory has met a message; answer with ``provide``."""

    request: Request
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The connection is over; its link is to be closed. Said exactly once.

    Attributes:
        error: What requests made from now on fail with.
        graceful: Close the link after what is queued, rather than at once.
    """

    error: ConnectionClosed
    graceful: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOpened:
    """The peer asks for a KV transfer; answer with ``agree``, or fail it."""

    request: Request
    id: bytes
    description: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferAgreed:
    """The peer has answered a transfer of ours; segments may move."""

    request: Request
    description: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMarked:
    """A segment is about to arrive; give it memory with ``place`` before returning."""

    segment: Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLanded:
    """All of a segment is here; ``segment.damaged`` says whether it can be used."""

    segment: Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentsAcknowledged:
    """The consumer has these segments of a transfer."""

    request: Request
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferCommitted:
    """The producer marks nothing more; ``complete`` if it has marked everything."""

    request: Request
    complete: bool


Event = (
    RequestDone
    | MemoryWanted
    | Ended
    | TransferOpened
    | TransferAgreed
    | SegmentMarked
    | SegmentLanded
    | SegmentsAcknowledged
    | TransferCommitted
)
