"""The output of a core: events for its driver, and control frames for the peer.

Events are msgspec structs, which are created ten times as fast as frozen dataclasses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from kvwire.errors import ConnectionClosed, KVWireError
from kvwire.proto.framing import Framing
from kvwire.proto.records import ChunkArrival, RequestRecord, SegmentRecord
from kvwire.types import BufferId, RequestId
from kvwire.wire.control import (
    Body,
    WindowGet,
    WindowMemoryBody,
    WindowViewBody,
    encode_body,
)


class RequestDone(msgspec.Struct, frozen=True, kw_only=True):
    """Reports the end of a request, exactly once for each.

    Attributes:
        request: The request.
        error: Why it failed, or None.
        nbytes: Bytes moved, if it did not fail.
        held: The buffer of a held message that this RECV took. It has drained; the
            front has kept its memory until now.
    """

    request: RequestRecord
    error: KVWireError | None
    nbytes: int
    held: BufferId | None = None


class MemoryWanted(msgspec.Struct, frozen=True, kw_only=True):
    """Reports a matched message that needs memory from the front.

    Either the RECV was posted without memory, or it is about device memory. Call
    ``provide``, or ``filled`` if there is a held message.

    Attributes:
        request: The RECV, or the SEND from a device.
        nbytes: The message's length.
        held: The buffer of a held message that a RECV into a device took. It has
            drained; the front has kept its memory until now.
    """

    request: RequestRecord
    nbytes: int
    held: BufferId | None = None


class MessageArrived(msgspec.Struct, frozen=True):
    """Reports a message whose RECV remains posted.

    Attributes:
        request: The RECV.
        body: The message.
    """

    request: RequestRecord
    body: bytes | memoryview


class MessageKept(msgspec.Struct, frozen=True, kw_only=True):
    """Reports the bytes of a message whose RECV ended while it arrived.

    The front keeps them like the bytes of a held message.
    """

    buffer: BufferId
    body: bytes | memoryview


class MessageDropped(msgspec.Struct, frozen=True, kw_only=True):
    """Reports a held message that was dropped; the front may free its memory."""

    buffer: BufferId


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """Reports the end of the connection, exactly once; the front closes its link.

    Attributes:
        error: The error of requests made from now on.
        graceful: Whether the link first sends the frames that are queued.
    """

    error: ConnectionClosed
    graceful: bool


class TransferOpened(msgspec.Struct, frozen=True, kw_only=True):
    """Reports the peer's request for a KV transfer; call ``agree``, or fail it."""

    request: RequestRecord
    id: bytes
    description: bytes


class TransferAgreed(msgspec.Struct, frozen=True, kw_only=True):
    """Reports the peer's answer to this side's transfer; segments may move."""

    request: RequestRecord
    description: bytes


class SegmentMarked(msgspec.Struct, frozen=True, kw_only=True):
    """Reports a segment that is about to arrive; call ``place`` at once."""

    segment: SegmentRecord


class SegmentLanded(msgspec.Struct, frozen=True, kw_only=True):
    """Reports a segment that has arrived; unusable if ``segment.damaged``."""

    segment: SegmentRecord


class SegmentsAcknowledged(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that the consumer has these segments of a transfer."""

    request: RequestRecord
    numbers: tuple[int, ...]


class TransferSettled(msgspec.Struct, frozen=True, kw_only=True):
    """Reports to the consumer that all segments of a transfer have arrived."""

    request: RequestRecord


class WindowAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that the peer opens a window; call ``answer``."""

    wire_id: RequestId
    name: str


class WindowMemoryOffered(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that a lane can read an open window of the peer in place."""

    body: WindowMemoryBody


class WindowViewed(msgspec.Struct, frozen=True, kw_only=True):
    """Reports the geometry of the cache into which the peer will read."""

    body: WindowViewBody


class WindowRead(msgspec.Struct, frozen=True, kw_only=True):
    """Reports the peer's get; call ``serve`` or ``finish``, or fail the request."""

    request: RequestRecord
    body: WindowGet


class WindowReadTogether(msgspec.Struct, frozen=True, kw_only=True):
    """Reports the peer's small get; call ``send_data`` or ``refuse``."""

    wire_id: RequestId
    body: WindowGet


class WindowSent(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that a get's bytes were sent; compare again, and call ``finish``."""

    request: RequestRecord


class WindowClosed(msgspec.Struct, frozen=True, kw_only=True):
    """Reports to a reader that the owner has closed a window; it answers ``close``."""

    window: int


class WindowLeft(msgspec.Struct, frozen=True, kw_only=True):
    """Reports to an owner that the peer no longer reads a window."""

    window: int


class LaneAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Reports a client's request for a lane; call ``answer`` or ``lane_gone``."""

    lane: int
    backend: str
    bootstrap: bytes


class LaneBootstrapped(msgspec.Struct, frozen=True, kw_only=True):
    """Reports the server's endpoint to a client; ``ready`` or ``lane_gone``."""

    lane: int
    bootstrap: bytes


class LaneOpened(msgspec.Struct, frozen=True, kw_only=True):
    """Reports to a server that a lane is open; for lane 0, the initial set."""

    lane: int


class LaneClosed(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that the peer's endpoint has ended; end ours, then call ``lane_gone``."""

    lane: int
    reason: str


class LaneStalled(msgspec.Struct, frozen=True, kw_only=True):
    """Reports a lane that has lost its path; end it, then call ``lane_gone``."""

    lane: int
    reason: str


class LaneDataReceived(msgspec.Struct, frozen=True, kw_only=True):
    """Reports a payload on a lane; receive it, then call ``payload_landed``."""

    arrival: ChunkArrival
    descriptor: bytes


LaneEvent = (
    LaneAsked
    | LaneBootstrapped
    | LaneOpened
    | LaneClosed
    | LaneStalled
    | LaneDataReceived
)
WindowEvent = (
    WindowAsked
    | WindowMemoryOffered
    | WindowViewed
    | WindowRead
    | WindowReadTogether
    | WindowSent
    | WindowClosed
    | WindowLeft
)
Event = (
    RequestDone
    | MemoryWanted
    | MessageArrived
    | MessageKept
    | MessageDropped
    | Ended
    | TransferOpened
    | TransferAgreed
    | SegmentMarked
    | SegmentLanded
    | SegmentsAcknowledged
    | TransferSettled
    | WindowEvent
    | LaneEvent
)


class Outbox:
    """Queues the frames of one connection for its peer, and events for its front.

    Attributes:
        framing: Numbers and seals the frames of the control link.
        frames: (header, body) of frames, oldest first. The front empties the list after
            each call into the core, so it contains only the frames of one call.
        events: Events for the front, handled in the same way.
        report: Queues one event.
        shut: Whether the connection has ended; frames are then dropped.
    """

    __slots__ = ("events", "frames", "framing", "report", "shut")

    def __init__(self, framing: Framing) -> None:
        self.framing: Framing = framing
        self.frames: deque[tuple[bytes, bytes | memoryview]] = deque()
        self.events: list[Event] = []  # bounded: REQUESTS_MAX
        # The list's own method, since there are several events per frame.
        self.report: Callable[[Event], None] = self.events.append
        self.shut: bool = False

    def send(self, frame_type: int, body: Body, *, request: int = 0) -> None:
        """Queue one control frame, or drop it after the end of the connection."""
        if self.shut:
            return
        self.frames.append(  # bounded: CONTROL_QUEUE_BYTES_MAX, by the front
            self.framing.control(frame_type, encode_body(body), request=request)
        )
