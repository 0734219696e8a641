"""What the core says is kept in its order, and nothing is said after the end."""

from __future__ import annotations

from kvwire.errors import ClosedOK
from kvwire.proto.events import Ended
from kvwire.proto.framing import Framing
from kvwire.proto.outbox import Outbox
from kvwire.wire.control import Fin, Ping, decode_body
from kvwire.wire.header import FrameType, decode_header


def test_frames_and_events_in_order() -> None:
    """Numbered as they are queued, with the request in the header."""
    outbox = Outbox(Framing())
    outbox.send(FrameType.PING, Ping(1))
    outbox.send(FrameType.FIN, Fin(5), request=9)
    read = [(decode_header(header), body) for header, body in outbox.frames]
    assert [(h.type, h.sequence, h.request) for h, _ in read] == [
        (FrameType.PING, 0, 0),
        (FrameType.FIN, 1, 9),
    ]
    assert decode_body(FrameType.FIN, read[1][1]) == Fin(5)
    ended = Ended(error=ClosedOK("over"), graceful=True)
    outbox.report(ended)
    assert outbox.events == [ended]


def test_nothing_is_said_after_the_end() -> None:
    """Not even numbered; what was queued before goes out."""
    outbox = Outbox(Framing())
    outbox.send(FrameType.PING, Ping(1))
    outbox.shut = True
    outbox.send(FrameType.PING, Ping(2))
    assert len(outbox.frames) == 1
    assert outbox.framing.sent == 1
