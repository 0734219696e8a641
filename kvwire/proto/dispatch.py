"""Which part of the core acts on a control frame, by its type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvwire.errors import (
    ClosedOK,
    PeerError,
    RequestError,
    UnexpectedFrame,
    WireCode,
    error_from_code,
    shown,
)
from kvwire.limits import REASON_CHARS_MAX
from kvwire.proto.lanes import LaneTable
from kvwire.proto.liveness import Liveness
from kvwire.proto.messages import Messages
from kvwire.proto.onesided import OneSided
from kvwire.proto.outbox import Outbox
from kvwire.proto.requests import RequestTable
from kvwire.proto.state import RequestKind
from kvwire.proto.transfers import Transfers
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
    LaneData,
    Open,
    Ping,
    Ready,
    SegmentAck,
    SegmentBody,
    narrowed,
)
from kvwire.wire.header import FrameType, Header

# Those that begin when the application at the other end does its part.
MET_BY_PEER = frozenset({RequestKind.SEND, RequestKind.OUTGOING, RequestKind.INCOMING})


@dataclass(frozen=True, slots=True)
class FrameHandlers:
    """Holds the parts of a connection that act on control frames."""

    messages: Messages
    onesided: OneSided
    transfers: Transfers
    lanes: LaneTable
    liveness: Liveness


class Dispatch:
    """Hands the control frames of one connection to the parts of its core."""

    def __init__(
        self,
        outbox: Outbox,
        requests: RequestTable,
        parts: FrameHandlers,
        *,
        check_may_start: Callable[[Header], None],
        peer_closed: Callable[[Close], None],
    ) -> None:
        self._outbox = outbox
        self._requests = requests
        self._messages = parts.messages
        self._onesided = parts.onesided
        self._transfers = parts.transfers
        self._lanes = parts.lanes
        self._liveness = parts.liveness
        self._check_may_start = check_may_start
        self._peer_closed = peer_closed

    def control(self, header: Header, body: Body, now: float) -> None:
        """Act on a control frame.

        Raises:
            ProtocolError: The frame breaks a rule.
        """
        if header.type < FrameType.ANNOUNCE:
            self._of_connection(header, body, now)
        elif header.type < FrameType.OPEN:
            self._of_request(header, body)
        else:
            self._of_transfer(header, body)

    def _of_connection(self, header: Header, body: Body, now: float) -> None:
        match header.type:
            case FrameType.PING:
                self._liveness.ping_received(now)
                self._outbox.send(FrameType.PONG, body)
            case FrameType.PONG:
                self._liveness.pong_received(narrowed(body, Ping).number)
            case FrameType.CLOSE:
                self._peer_closed(narrowed(body, Close))
            case FrameType.CREDIT:
                self._messages.credit_received(narrowed(body, Credit))
            case _:
                self._lanes.control(header.type, body)

    def _of_request(self, header: Header, body: Body) -> None:
        match header.type:
            case FrameType.ANNOUNCE:
                self._check_may_start(header)
                self._messages.announced(header, narrowed(body, Announce))
            case FrameType.READY:
                self._messages.ready_received(header, narrowed(body, Ready))
            case FrameType.PUT | FrameType.GET:
                self._check_may_start(header)
                self._onesided.asked(header, narrowed(body, AccessBody))
            case FrameType.FIN:
                self._done(header, narrowed(body, Fin))
            case FrameType.LANE_DATA:
                self._lanes.data_received(header, narrowed(body, LaneData))
            case _:
                self._failed(header, narrowed(body, Fail))

    def _of_transfer(self, header: Header, body: Body) -> None:
        match header.type:
            case FrameType.OPEN:
                self._check_may_start(header)
                self._transfers.opened(header, narrowed(body, Open))
            case FrameType.AGREE:
                self._transfers.agreed(header, narrowed(body, Agree))
            case FrameType.SEGMENT:
                self._transfers.marked(header, narrowed(body, SegmentBody))
            case FrameType.SEGMENT_ACK:
                self._transfers.landed_received(header, narrowed(body, SegmentAck))
            case FrameType.COMMIT:
                self._transfers.committed(header, narrowed(body, Commit))
            case _:
                self._transfers.settled(header, narrowed(body, CommitAck))

    def _done(self, header: Header, body: Fin) -> None:
        request = self._requests.find(header.request)
        if request is not None and request.kind is RequestKind.INCOMING:
            self._transfers.confirmed(request)
        else:
            self._onesided.done_received(header, body)

    def _failed(self, header: Header, body: Fail) -> None:
        request = self._requests.find(header.request)
        if request is None:
            self._messages.withdrawn(header.request)
            return
        # Whole, as it may name every field that differs.
        text = f"the peer ended it: {shown(body.reason, REASON_CHARS_MAX)}"
        error = error_from_code(body.code, text)
        if request.kind in MET_BY_PEER and body.code == WireCode.GOING_AWAY:
            error = ClosedOK(text)
        elif not isinstance(error, RequestError):
            error = PeerError(text)
        self._requests.fail(request, error, tell=None)


def check_numbers(header: Header) -> None:
    """Refuse a control frame with fields that its type does not have.

    Raises:
        UnexpectedFrame: It has.
    """
    if header.segment or header.offset:
        raise UnexpectedFrame("KVW-CN-02", "a control frame with data fields")
    if (header.request == 0) != (header.type < FrameType.ANNOUNCE):
        raise UnexpectedFrame(
            "KVW-CN-02",
            f"{FrameType(header.type).name} for request {header.request}",
        )
