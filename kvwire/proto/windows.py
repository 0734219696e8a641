"""Windows: reads of finished blocks that the owner has exposed to its peers.

A reader opens a window once, by its name, and gets the window's number on this
connection and the geometry of the owner's cache. For each local cache that it reads
into, it sends the geometry (a *view*). After that a get contains only block names, each
with its generation from the offer::

    reader                                 owner
      WINDOW_OPEN name              ->
                                    <-       WINDOW_OPENED number, geometry, lane
                                    <-       WINDOW_MEMORY, when a lane comes up later
      WINDOW_VIEW number, geometry  ->
      WINDOW_GET view, blocks       ->       compares the generations
                                    <-       DATA ... straight from the cache
                                    <-       WINDOW_GOT, compared again behind them
      WINDOW_GET together           ->
                                    <-       WINDOW_DATA, compared before it
                                    <-       WINDOW_CLOSE, or the reader first
      WINDOW_CLOSE                  ->       once no lane of the reader reads it

If a lane reads memory in place, a get needs no frames. The owner never waits for a
reader: if a block is withdrawn in the middle of a get, WINDOW_GOT reports that, and its
bytes are ignored.

A small get is answered by a single frame: the owner gathers the blocks, and then
compares their generations before it sends the frame.

This module does not know generations: it reports a get, and the front answers.
"""

from __future__ import annotations

from typing import Final

from kvwire.errors import (
    AccessDenied,
    KVWireError,
    StaleRegion,
    UnexpectedFrame,
    UsageError,
)
from kvwire.limits import WINDOW_DATA_BYTES_MAX, WINDOW_GET_BYTES_MAX
from kvwire.proto.chunks import ChunkMover
from kvwire.proto.events import (
    Outbox,
    WindowAsked,
    WindowClosed,
    WindowLeft,
    WindowMemoryOffered,
    WindowRead,
    WindowReadTogether,
    WindowSent,
    WindowViewed,
)
from kvwire.proto.records import ChunkArrival, ChunkPlace, RequestRecord
from kvwire.proto.requests import RequestTable
from kvwire.proto.state import FIRST_STATE, RequestInput, RequestKind, RequestStage
from kvwire.types import BufferId, RequestId
from kvwire.wire.control import (
    WindowClose,
    WindowGet,
    WindowGot,
    WindowMemoryBody,
    WindowOpen,
    WindowOpened,
    WindowViewBody,
)
from kvwire.wire.header import FrameType, Header

# The most windows of the peer that are open on one connection.
WINDOWS_OPEN_MAX: Final = 1024

_NOWHERE = ChunkPlace.NOWHERE
_WHOLE = ChunkPlace.WHOLE
_WINDOW_DATA = int(FrameType.WINDOW_DATA)
_READ = RequestKind.READ
_SERVE_READ = RequestKind.SERVE_READ


class WindowReads:
    """Runs both sides' windows on one connection."""

    def __init__(
        self, outbox: Outbox, requests: RequestTable, chunks: ChunkMover
    ) -> None:
        self._outbox = outbox
        self._requests = requests
        self._chunks = chunks
        chunks.on_read_sent = self._sent
        # This side's windows that the peer has open, the peer's windows, and the last
        # number of this side's windows; numbers are never reused.
        self._shown: set[int] = set()
        self._opened: set[int] = set()
        self._last = 0

    # --- reader -----------------------------------------------------------------------

    def open(self, request: RequestRecord, name: str) -> None:
        """Request a window; its RequestDone has the answer in ``request.answer``."""
        self._requests.start(request)
        body = WindowOpen(name=name)
        self._outbox.send(FrameType.WINDOW_OPEN, body, request=request.wire_id)

    def report(self, body: WindowViewBody | WindowMemoryBody) -> None:
        """Send a reader's view, or an owner's memory on a new lane."""
        view = isinstance(body, WindowViewBody)
        frame = FrameType.WINDOW_VIEW if view else FrameType.WINDOW_MEMORY
        self._outbox.send(frame, body)

    def get(self, request: RequestRecord, body: WindowGet) -> None:
        """Request blocks, which land in the request's memory."""
        self._requests.start(request)
        self._outbox.send(FrameType.WINDOW_GET, body, request=request.wire_id)
        if not body.together:
            self._chunks.begin_receive(request)

    def opened(self, header: Header, body: WindowOpened) -> None:
        """Handle WINDOW_OPENED."""
        request = self._requests.find(header.request)
        if request is None:
            self.close(body.window)  # the request has ended meanwhile
            return
        if request.kind is not RequestKind.OPEN_WINDOW:
            raise UnexpectedFrame(
                "KVW-WN-01", f"WINDOW_OPENED for a {request.kind.value}"
            )
        if body.window in self._opened or len(self._opened) >= WINDOWS_OPEN_MAX:
            raise UnexpectedFrame(
                "KVW-WN-02", f"window {body.window} is open already, or one too many"
            )
        self._opened.add(body.window)  # bounded: WINDOWS_OPEN_MAX
        request.answer = body
        request.advance(RequestInput.CONFIRMED)
        self._requests.finish(request)

    def memory_received(self, body: WindowMemoryBody) -> None:
        """Handle WINDOW_MEMORY: a lane can read the window in place."""
        if body.window in self._opened:
            self._outbox.report(WindowMemoryOffered(body=body))

    def got(self, header: Header, body: WindowGot) -> None:
        """Handle WINDOW_GOT: the owner has sent all valid blocks."""
        request = self._requests.find(header.request)
        if request is None:
            return
        if request.kind is not _READ or request.answer is not None:
            raise UnexpectedFrame(
                "KVW-WN-03", f"WINDOW_GOT for a {request.kind.value}, or a second one"
            )
        request.answer = body
        if body.sent and request.arrived is None:
            raise UnexpectedFrame(
                "KVW-WN-08", "bytes as DATA for a get that is answered in one frame"
            )
        if not body.sent:
            if request.moved or request.state is not RequestStage.MOVING:
                raise UnexpectedFrame(
                    "KVW-WN-04", "bytes of a get whose WINDOW_GOT reports none"
                )
            request.advance(RequestInput.MOVED)
        elif request.state is RequestStage.MOVING:
            request.confirmed = True  # the last bytes arrive on a lane
            return
        request.advance(RequestInput.CONFIRMED)
        self._requests.finish(request)

    def data_header(self, header: Header) -> ChunkArrival:
        """Return the place for the body of WINDOW_DATA."""
        request = self._requests.find(header.request)
        if request is None:
            return ChunkArrival(_NOWHERE, header)
        if (
            request.kind is not _READ
            or request.arrived is not None
            or request.moved
            or header.length != request.nbytes
        ):
            raise UnexpectedFrame(
                "KVW-WN-08",
                f"WINDOW_DATA of {header.length} bytes for a {request.kind.value}",
            )
        request.moved = header.length
        return ChunkArrival(_WHOLE, header, request=request)

    def data_landed(
        self, arrival: ChunkArrival, data: bytes | memoryview, *, intact: bool
    ) -> None:
        """End a get whose bytes arrived in one frame; the front copies them."""
        request = arrival.request
        assert request is not None
        if request.over:
            return
        request.answer = data
        request.damaged = not intact
        request.advance(RequestInput.MOVED)
        request.advance(RequestInput.CONFIRMED)
        self._requests.finish(request)

    # --- owner ------------------------------------------------------------------------

    def asked(self, header: Header, body: WindowOpen) -> None:
        """Handle WINDOW_OPEN; the front calls ``answer``."""
        wire_id = self._requests.admit(header.request)
        self._outbox.report(WindowAsked(wire_id=wire_id, name=body.name))

    def number(self) -> int:
        """Return the next window's number on this connection.

        Raises:
            UsageError: The peer has too many windows open.
        """
        if len(self._shown) >= WINDOWS_OPEN_MAX:
            raise UsageError(
                f"{WINDOWS_OPEN_MAX} windows are open on this connection, which is "
                "the limit; close some"
            )
        self._last += 1
        self._shown.add(self._last)  # bounded: WINDOWS_OPEN_MAX
        return self._last

    def answer(self, wire_id: int, answer: WindowOpened | str) -> None:
        """Answer WINDOW_OPEN; if the argument is a text, refuse with this reason."""
        if isinstance(answer, str):
            self._requests.send_fail(wire_id, AccessDenied.code, answer)
        else:
            self._outbox.send(FrameType.WINDOW_OPENED, answer, request=wire_id)

    def viewed(self, body: WindowViewBody) -> None:
        """Handle WINDOW_VIEW."""
        self._check_shown(body.window)
        self._outbox.report(WindowViewed(body=body))

    def get_asked(self, header: Header, body: WindowGet) -> None:
        """Handle WINDOW_GET; the front calls ``serve``, or fails the request."""
        wire_id = self._requests.admit(header.request)
        if (
            2 * len(body.entries) != len(body.generations)
            or 4 * sum(body.counts) != len(body.entries)
            or (body.nbytes > WINDOW_GET_BYTES_MAX and sum(body.counts) > 1)
        ):
            raise UnexpectedFrame(
                "KVW-WN-05", "a WINDOW_GET whose lists differ in length"
            )
        if body.together:
            if body.nbytes > WINDOW_DATA_BYTES_MAX:
                raise UnexpectedFrame("KVW-WN-05", f"{body.nbytes} bytes together")
            if body.window in self._shown:
                self._outbox.report(WindowReadTogether(wire_id=wire_id, body=body))
            else:
                self.refuse(wire_id, StaleRegion("the window was closed"))
            return
        request = RequestRecord(
            kind=_SERVE_READ,
            wire_id=wire_id,
            buffer=None,
            nbytes=body.nbytes,
            state=FIRST_STATE[_SERVE_READ],
        )
        self._requests.serve(request)
        if body.window not in self._shown:
            error = StaleRegion("the window was closed")
            self._requests.fail(request, error, code=error.code)
            return
        self._outbox.report(WindowRead(request=request, body=body))

    def serve(self, request: RequestRecord, buffer: BufferId) -> None:
        """Send the bytes of a get; WindowSent follows when all were sent."""
        request.buffer = buffer
        self._chunks.begin_send(request)

    def refuse(self, wire_id: RequestId, error: KVWireError) -> None:
        """Answer a small get with an error."""
        self._requests.send_fail(wire_id, error.code, str(error))

    def data_frame(self, wire_id: RequestId, nbytes: int, check: int | None) -> bytes:
        """Return the header of the frame with which the front answers a small get.

        The frame is the next one that is sent.
        """
        payload = self._outbox.framing.payload
        return payload(_WINDOW_DATA, nbytes, wire_id, check=check)

    def withhold(self, wire_id: RequestId, stale: bytes) -> None:
        """Answer a small get that has stale blocks."""
        body = WindowGot(sent=False, stale=stale)
        self._outbox.send(FrameType.WINDOW_GOT, body, request=wire_id)

    def finish(self, request: RequestRecord, stale: bytes, *, sent: bool) -> None:
        """Answer a get, once its bytes were sent or if all its blocks are stale."""
        if request.over:
            return
        if not sent:
            request.advance(RequestInput.MOVED)
        body = WindowGot(sent=sent, stale=stale)
        self._outbox.send(FrameType.WINDOW_GOT, body, request=request.wire_id)
        request.advance(RequestInput.CONFIRMED)
        self._requests.finish(request)

    # --- the end ----------------------------------------------------------------------

    def close(self, window: int) -> None:
        """Report that this side no longer reads a window of the peer."""
        self._opened.discard(window)
        body = WindowClose(window=window, mine=False)
        self._outbox.send(FrameType.WINDOW_CLOSE, body)

    def hide(self, window: int) -> None:
        """End a window of this side; the peer answers once it has stopped reading."""
        body = WindowClose(window=window, mine=True)
        self._outbox.send(FrameType.WINDOW_CLOSE, body)

    def closed_received(self, body: WindowClose) -> None:
        """Handle WINDOW_CLOSE from the owner or from a reader."""
        if not body.mine:
            self._check_shown(body.window)
            if body.window not in self._shown:
                return
            self._shown.discard(body.window)
            self._outbox.report(WindowLeft(window=body.window))
        elif body.window in self._opened:  # otherwise it was closed here already
            self._outbox.report(WindowClosed(window=body.window))

    def _sent(self, request: RequestRecord) -> None:
        self._outbox.report(WindowSent(request=request))

    def _check_shown(self, window: int) -> None:
        if not 0 < window <= self._last:
            raise UnexpectedFrame("KVW-WN-06", f"window {window}, which was never open")
