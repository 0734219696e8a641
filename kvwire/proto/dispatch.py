"""Hands each control frame to the part of the core that handles its type."""

from __future__ import annotations

from collections.abc import Callable
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
from kvwire.proto.events import Outbox
from kvwire.proto.lanes import LaneTable
from kvwire.proto.liveness import Liveness
from kvwire.proto.messages import Messages
from kvwire.proto.onesided import OneSided
from kvwire.proto.requests import RequestTable
from kvwire.proto.state import RequestKind
from kvwire.proto.transfers import Transfers
from kvwire.proto.windows import WindowReads
from kvwire.wire.control import (
    Body,
    Close,
    Fail,
    Fin,
)
from kvwire.wire.header import FrameType, Header

# Frames that start an exchange; not allowed after the peer's CLOSE.
_STARTS = frozenset(
    {
        FrameType.ANNOUNCE,
        FrameType.PUT,
        FrameType.GET,
        FrameType.OPEN,
        FrameType.WINDOW_OPEN,
        FrameType.WINDOW_GET,
    }
)
# Kinds of requests that may wait for the application at the other end.
MET_BY_PEER = frozenset({RequestKind.SEND, RequestKind.OUTGOING, RequestKind.INCOMING})


class Dispatch:
    """Hands the control frames of one connection to the parts of its core."""

    def __init__(
        self,
        outbox: Outbox,
        requests: RequestTable,
        parts: tuple[Messages, OneSided, Transfers, LaneTable, WindowReads, Liveness],
        *,
        check_may_start: Callable[[Header], None],
        peer_closed: Callable[[Close], None],
    ) -> None:
        self._outbox = outbox
        self._requests = requests
        messages, onesided, transfers, lanes, windows, liveness = parts
        self._messages = messages
        self._onesided = onesided
        self._transfers = transfers
        self._liveness = liveness
        # Handlers for the connection's frames, and for frames of a request or its
        # payload. Each gets the decoded body.
        self._of_connection: dict[int, Callable[[Any], None]] = {
            FrameType.PONG: liveness.pong_received,
            FrameType.CLOSE: peer_closed,
            FrameType.CREDIT: messages.credit_received,
            FrameType.LANE_OPEN: lanes.open_received,
            FrameType.LANE_READY: lanes.ready_received,
            FrameType.LANE_CLOSE: lanes.close_received,
            FrameType.LANE_ACK: lanes.ack_received,
            FrameType.WINDOW_VIEW: windows.viewed,
            FrameType.WINDOW_MEMORY: windows.memory_received,
            FrameType.WINDOW_CLOSE: windows.closed_received,
        }
        self._of_request: dict[int, Callable[[Header, Any], object]] = {
            FrameType.ANNOUNCE: messages.announced,
            FrameType.READY: messages.ready_received,
            FrameType.PUT: onesided.asked,
            FrameType.GET: onesided.asked,
            FrameType.FIN: self._done,
            FrameType.FAIL: self._failed,
            FrameType.LANE_DATA: lanes.data_received,
            FrameType.WINDOW_OPEN: windows.asked,
            FrameType.WINDOW_OPENED: windows.opened,
            FrameType.WINDOW_GET: windows.get_asked,
            FrameType.WINDOW_GOT: windows.got,
            FrameType.OPEN: transfers.opened,
            FrameType.AGREE: transfers.agreed,
            FrameType.SEGMENT: transfers.marked,
            FrameType.SEGMENT_ACK: transfers.landed_received,
            FrameType.COMMIT: transfers.committed,
            FrameType.COMMIT_ACK: transfers.settled,
        }
        self._check_may_start = check_may_start

    def control(self, header: Header, body: Body, now: float) -> None:
        """Act on a control frame."""
        if header.type == FrameType.PING:
            self._liveness.ping_received(now)
            self._outbox.send(FrameType.PONG, body)
        elif about := self._of_connection.get(header.type):
            about(body)
        else:
            if header.type in _STARTS:
                self._check_may_start(header)
            self._of_request[header.type](header, body)

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
        # Not shortened, because it may name every differing field.
        text = f"the peer ended it: {shown(body.reason, REASON_CHARS_MAX)}"
        error = error_from_code(body.code, text)
        if request.kind in MET_BY_PEER and body.code == WireCode.GOING_AWAY:
            error = ClosedOK(text)
        elif not isinstance(error, RequestError):
            error = PeerError(text)
        self._requests.fail(request, error, code=None)


def check_numbers(header: Header) -> None:
    """Raise if a control frame's header sets a field that its type does not use."""
    if header.segment or header.offset:
        raise UnexpectedFrame("KVW-CN-02", "a control frame with data fields")
    if (header.request == 0) != (header.type < FrameType.ANNOUNCE):
        raise UnexpectedFrame(
            "KVW-CN-02",
            f"{FrameType(header.type).name} for request {header.request}",
        )
