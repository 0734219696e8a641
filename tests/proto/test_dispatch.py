"""Each control frame reaches its part of the core, and only those that may come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvwire.errors import (
    ClosedOK,
    KVWireError,
    PeerError,
    UnexpectedFrame,
    WireCode,
)
from kvwire.limits import REASON_CHARS_MAX
from kvwire.proto.dispatch import Dispatch, check_numbers
from kvwire.proto.framing import Framing
from kvwire.proto.holds import Holds
from kvwire.proto.outbox import Outbox
from kvwire.proto.requests import RequestRecord, RequestTable
from kvwire.proto.state import RequestKind
from kvwire.types import Role
from kvwire.wire.control import (
    AccessBody,
    Agree,
    Announce,
    Body,
    Close,
    Commit,
    CommitAck,
    Credit,
    Fail,
    Fin,
    LaneAck,
    LaneClose,
    LaneData,
    LaneOpen,
    LaneReady,
    Open,
    Ping,
    Ready,
    SegmentAck,
    SegmentBody,
)
from kvwire.wire.header import (
    FIRST_PAYLOAD_TYPE,
    HANDSHAKE_TYPES,
    Flag,
    FrameType,
    Header,
    decode_header,
    encode_header,
)

GRANTED = AccessBody(1, 1, bytes(16), 0, 1)
BOX = (0, 0, 1, 0, 1)

# Who gets what: the part, its method, and whether the request begins with it.
ROUTES: dict[FrameType, tuple[Body, str, bool]] = {
    FrameType.PING: (Ping(7), "liveness.ping_received", False),
    FrameType.PONG: (Ping(7), "liveness.pong_received", False),
    FrameType.CLOSE: (Close(1), "peer_closed", False),
    FrameType.CREDIT: (Credit(1, 1), "messages.credit_received", False),
    FrameType.LANE_OPEN: (LaneOpen(1, "ucx", b""), "lanes.open_received", False),
    FrameType.LANE_READY: (LaneReady(1), "lanes.ready_received", False),
    FrameType.LANE_CLOSE: (LaneClose(1, "", 0, ()), "lanes.close_received", False),
    FrameType.LANE_ACK: (LaneAck(1, 1), "lanes.ack_received", False),
    FrameType.ANNOUNCE: (Announce(b"12345678", 1), "messages.announced", True),
    FrameType.READY: (Ready(1), "messages.ready_received", False),
    FrameType.PUT: (GRANTED, "onesided.asked", True),
    FrameType.GET: (GRANTED, "onesided.asked", True),
    FrameType.FIN: (Fin(1), "onesided.done_received", False),
    FrameType.FAIL: (Fail(1, ""), "messages.withdrawn", False),
    FrameType.LANE_DATA: (
        LaneData(1, 0, 0, 1, None, b""),
        "lanes.data_received",
        False,
    ),
    FrameType.OPEN: (Open(b"id", True, 0, b""), "transfers.opened", True),
    FrameType.AGREE: (Agree(b""), "transfers.agreed", False),
    FrameType.SEGMENT: (SegmentBody(1, BOX, 1), "transfers.marked", False),
    FrameType.SEGMENT_ACK: (SegmentAck((1,)), "transfers.landed_received", False),
    FrameType.COMMIT: (Commit(1, True), "transfers.committed", False),
    FrameType.COMMIT_ACK: (CommitAck(()), "transfers.settled", False),
}


class Part:
    """Stands for any part of a core, and notes what it is told."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls

    def __getattr__(self, method: str) -> Any:
        return lambda *_: self._calls.append(f"{self._name}.{method}")


@dataclass
class Scene:
    """A dispatch between parts that only take notes."""

    calls: list[str] = field(default_factory=list)
    outbox: Outbox = field(default_factory=lambda: Outbox(Framing()))

    def __post_init__(self) -> None:
        self.holds = Holds()
        self.requests = RequestTable(Role.CLIENT, self.outbox, self.holds)
        parts: dict[str, Any] = {
            name: Part(name, self.calls)
            for name in ("messages", "onesided", "transfers", "lanes", "liveness")
        }
        self.dispatch = Dispatch(
            self.outbox,
            self.requests,
            tuple(parts.values()),
            check_may_start=lambda _: self.calls.append("check_may_start"),
            peer_closed=lambda _: self.calls.append("peer_closed"),
        )

    def hear(self, frame_type: FrameType, body: Body, request: int = 1) -> None:
        self.dispatch.control(header(frame_type, request), body, 1000.0)

    def begin(self, kind: RequestKind) -> RequestRecord:
        request = RequestRecord(
            kind=kind, wire_id=None, buffer=self.holds.new(), nbytes=1, base=0
        )
        self.requests.start(request)
        return request

    def failed(
        self, kind: RequestKind, code: int, reason: str = ""
    ) -> KVWireError | None:
        """How a request ends when the peer says FAIL."""
        request = self.begin(kind)
        assert request.wire_id is not None
        self.outbox.events.clear()
        self.hear(FrameType.FAIL, Fail(code, reason), request.wire_id)
        (event,) = self.outbox.events
        error: KVWireError | None = getattr(event, "error", None)
        return error


def header(
    frame_type: FrameType, request: int = 1, segment: int = 0, offset: int = 0
) -> Header:
    raw = encode_header(frame_type, Flag.CHECKED, 0, 1, request, segment, offset=offset)
    return decode_header(raw)


def test_every_control_frame_has_a_part() -> None:
    later = {t for t in FrameType if t < FIRST_PAYLOAD_TYPE} - HANDSHAKE_TYPES
    assert later - set(ROUTES) == {FrameType.OFFER, FrameType.CHOICE}


@pytest.mark.rule("KVW-CN-02", "keeps")
@pytest.mark.rule("KVW-CN-02", "breaks")
def test_a_frame_reaches_its_part() -> None:
    """With the numbers of its type; after CLOSE the peer may not begin anything."""
    for frame_type, (body, route, begins) in ROUTES.items():
        scene = Scene()
        # Request 1 was, and is over.
        scene.requests.fail(scene.begin(RequestKind.SEND), ClosedOK(""), tell=None)
        scene.hear(frame_type, body)
        assert scene.calls == [*(["check_may_start"] if begins else []), route]
        request = 0 if frame_type < FrameType.ANNOUNCE else 1
        check_numbers(header(frame_type, request))
        for wrong in (
            header(frame_type, 1 - request),
            header(frame_type, request, segment=1),
            header(frame_type, request, offset=1),
        ):
            with pytest.raises(UnexpectedFrame, match="KVW-CN-02"):
                check_numbers(wrong)


def test_done_ends_the_consumer_s_part_of_a_transfer() -> None:
    scene = Scene()
    request = scene.begin(RequestKind.INCOMING)
    assert request.wire_id is not None
    scene.hear(FrameType.FIN, Fin(0), request.wire_id)
    assert scene.calls == ["transfers.confirmed"]


def test_what_the_peer_says_when_it_ends_a_request() -> None:
    """Going away has met nothing; any other code without a class is the peer's."""
    for code in (WireCode.INTERNAL, WireCode.GOING_AWAY, WireCode.VERSION, 9999):
        assert type(Scene().failed(RequestKind.GET, code)) is PeerError
    for kind in (RequestKind.SEND, RequestKind.OUTGOING, RequestKind.INCOMING):
        assert type(Scene().failed(kind, WireCode.GOING_AWAY)) is ClosedOK
        assert type(Scene().failed(kind, WireCode.INTERNAL)) is PeerError


def test_the_words_of_a_peer_are_shown_and_steer_nothing() -> None:
    """All of them: they may name every field that differs."""
    error = Scene().failed(RequestKind.GET, WireCode.OTHER, "\x1b[2J" + "x" * 100)
    assert "\x1b" not in str(error)
    assert "x" * 100 in str(error)
    assert len(str(error)) < REASON_CHARS_MAX + 100
