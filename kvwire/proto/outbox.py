"""Control frames to send and events to report, collected while the core works."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvwire.proto.events import Event
from kvwire.proto.framing import Framing
from kvwire.wire.control import Body, encode_body


class Outbox:
    """Queues what one connection has for its peer and for its front.

    Attributes:
        framing: Numbers and seals the frames of the control link.
        frames: (header, body) of control frames, oldest first; the front empties it
            after each call into the core, so it holds what one call produced.
        events: Likewise, for the front itself.
        report: Queues one event.
        shut: The connection has ended: nothing is said to the peer any more.
    """

    __slots__ = ("events", "frames", "framing", "report", "shut")

    def __init__(self, framing: Framing) -> None:
        self.framing: Framing = framing
        self.frames: deque[tuple[bytes, bytes]] = deque()
        self.events: list[Event] = []  # bounded: REQUESTS_MAX
        # The list's own, since there are several events to a frame.
        self.report: Callable[[Event], None] = self.events.append
        self.shut: bool = False

    def send(self, frame_type: int, body: Body, *, request: int = 0) -> None:
        """Queue one control frame; after the end it is dropped."""
        if self.shut:
            return
        self.frames.append(  # bounded: CONTROL_QUEUE_BYTES_MAX, by the front
            self.framing.control(frame_type, encode_body(body), request=request)
        )
