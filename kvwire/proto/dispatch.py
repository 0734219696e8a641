"""Which part of the core acts on a control frame, by its type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    Body,
    Close,
    Credit,
    Fail,
    Fin,
    Ping,
    narrowed,
)
from kvwire.wire.header import FrameType, Header

# Frames that start something; after the peer's CLOSE there is none.
_STARTS = frozenset({FrameType.ANNOUNCE, FrameType.PUT, FrameType.GET, FrameType.OPEN})
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
        transfers = parts.transfers
        # Each gets the body that its type was decoded as.
        self._acts: dict[int, Callable[[Header, Any], None]] = {
            FrameType.ANNOUNCE: parts.messages.announced,
            FrameType.READY: parts.messages.ready_received,
            FrameType.PUT: parts.onesided.asked,
            FrameType.GET: parts.onesided.asked,
            FrameType.FIN: self._done,
            FrameType.FAIL: self._failed,
            FrameType.LANE_DATA: parts.lanes.data_received,
            FrameType.OPEN: transfers.opened,
            FrameType.AGREE: transfers.agreed,
            FrameType.SEGMENT: transfers.marked,
            FrameType.SEGMENT_ACK: transfers.landed_received,
            FrameType.COMMIT: transfers.committed,
            FrameType.COMMIT_ACK: transfers.settled,
        }
        self._check_may_start = check_may_start
        self._peer_closed = peer_closed

    def control(self, header: Header, body: Body, now: float) -> None:
        """Act on a control frame.

        Raises:
            ProtocolError: The frame breaks a rule.
        """
        act = self._acts.get(header.type)
        if act is None:
            self._of_connection(header, body, now)
            return
        if header.type in _STARTS:
            self._check_may_start(header)
        act(header, body)

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
