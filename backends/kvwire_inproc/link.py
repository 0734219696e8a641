"""The reference link: the contract of :mod:`kvwire.backend` as executable text.

All callbacks come from :meth:`InprocLink._turn`, which runs on the link's own loop, so
no callback comes from inside a call. Calls change the state and schedule a turn of the
link, or of its peer. A turn does the following, in this order:

1. Report the frames that the peer has received: their memory is free (``frame_sent``).
2. Report an empty queue, if an earlier flush left some.
3. Receive up to ``WAKEUP_BYTES``: ask the handler for each payload's destination, and
   copy it there from the sender's memory *at this moment*. So a sender that reuses
   memory before ``frame_sent`` always delivers wrong bytes, not just once in a while.
4. End, if this side aborted, or if the peer has ended and nothing is left to receive.

If both sides close at the same time nothing is lost: a closing link continues to
receive, and a link whose peer closed ends only when the peer has received its queue.
"""

from __future__ import annotations

import asyncio
import logging

from kvwire.backend import Landing, Link, LinkHandler, Payload
from kvwire.errors import ConnectionLost, UsageError
from kvwire.limits import CHUNK_BYTES, EAGER_BYTES_MAX, HEADER_BYTES, WAKEUP_BYTES
from kvwire.memory.copy import copy
from kvwire.types import Address
from kvwire_inproc.pipe import InprocPipe, PipeEnd, PipeFrame

_log = logging.getLogger("kvwire.inproc")


class InprocLink(Link):
    """One end of a link; made by :func:`join`."""

    pausable = True
    _peer: InprocLink

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        out: InprocPipe,
        into: InprocPipe,
        remote: Address | None,
    ) -> None:
        self._loop = loop
        self._out = out
        self._into = into
        self._remote = remote
        self._handler: LinkHandler | None = None
        self._unflushed: list[PipeFrame] = []
        self._unflushed_bytes = 0
        # Whether a flush left bytes, so that the handler has to be notified when they
        # are gone.
        self._waiting = False
        self._closing = False
        # Set at once when this side decides to end; the next turn notifies the handler.
        self._ending: PipeEnd | None = None
        self._ended = False
        # The landing of the frame whose header the handler has seen.
        self._landing: Landing | None = None
        self._received_bytes = 0
        self._paused = False
        self._woken = False

    # --- the contract -----------------------------------------------------------------

    def start(self, handler: LinkHandler) -> None:
        assert self._handler is None, "a link is started once"
        self._handler = handler
        self.wake()

    def send(
        self,
        header: bytes,
        payload: Payload | None = None,
        token: object | None = None,
    ) -> None:
        assert len(header) == HEADER_BYTES, "a header has a fixed length"
        if self._closing or self._ending is not None or self._ended:
            return
        frame = PipeFrame(header, payload, token)
        if token is None and frame.payload_bytes > EAGER_BYTES_MAX:
            raise UsageError(
                f"send: a payload of {frame.payload_bytes} bytes needs a token; only "
                f"payloads of up to {EAGER_BYTES_MAX} bytes need none"
            )
        self._unflushed.append(frame)
        self._unflushed_bytes += frame.nbytes

    def flush(self) -> None:
        if not self._unflushed:
            return
        frames = self._take_unflushed()
        for frame in frames:
            if frame.token is None and frame.payload is not None:
                frame.payload = _owned(frame.payload)
        self._out.put(frames)
        self._waiting = True
        self.wake_peer()

    def close(self) -> None:
        if self._closing:
            return
        self.flush()
        self._closing = True
        self._out.finish()
        if self._handler is None:
            self._end_unstarted()
        self.wake_peer()

    def abort(self) -> None:
        if self._ending is not None or self._ended:
            return
        self._ending = PipeEnd(ConnectionLost("the link was aborted on this side"))
        self._take_unflushed()
        self._out.end(ConnectionLost("the peer aborted the link"))
        if self._handler is None:
            self._end_unstarted()
        self.wake_peer()
        self.wake()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self.wake()

    @property
    def queued_bytes(self) -> int:
        return self._unflushed_bytes + self._out.queued_bytes

    @property
    def received_bytes(self) -> int:
        return self._received_bytes

    @property
    def remote_address(self) -> Address | None:
        return self._remote

    # --- turns ------------------------------------------------------------------------

    def wake(self) -> None:
        """Schedule a turn; from any thread."""
        if self._woken:
            return
        self._woken = True
        if _running_loop() is self._loop:
            self._loop.call_soon(self._turn)
        else:
            self._loop.call_soon_threadsafe(self._turn)

    def wake_peer(self) -> None:
        """Schedule a turn of the peer; if its loop is closed, end this side."""
        try:
            self._peer.wake()
        except RuntimeError:  # its loop is closed, so the peer is gone
            self._into.end(ConnectionLost("the peer's event loop is closed"))
            self.wake()

    def _turn(self) -> None:
        self._woken = False
        if self._handler is None or self._ended:
            return
        try:
            self._report(self._handler)
            self._receive(self._handler)
        except Exception as exc:  # noqa: BLE001 - a handler's bug ends its link only
            _log.error("a link's handler raised; the link is aborted", exc_info=exc)
            self._ending = PipeEnd(exc)
        end = self._ending or self._into.outcome()
        if end is not None and (end.error or not self._closing or self._out.drained):
            self._finish(self._handler, end)

    def _report(self, handler: LinkHandler) -> None:
        for token in self._out.take_sent():
            handler.frame_sent(self, token)
            if self._ending is not None:
                return
        if self._waiting and not self.queued_bytes and not self._over():
            self._waiting = False
            handler.link_writable(self)

    def _over(self) -> bool:
        return self._closing or self._into.outcome() is not None

    def _receive(self, handler: LinkHandler) -> None:
        budget = WAKEUP_BYTES
        while self._ending is None and (frame := self._into.head()) is not None:
            if self._paused and self._landing is None:
                return
            if budget <= 0:
                self.wake()
                return
            if self._landing is None:
                self._received_bytes += HEADER_BYTES
                budget -= HEADER_BYTES
                # Released at once, so that a handler that keeps the view gets an error.
                with memoryview(frame.header) as header:
                    self._landing = handler.header_received(self, header)
                if self._ending is None:
                    _check_landing(self._landing, frame)
            elif frame.moved < frame.payload_bytes:
                budget -= self._receive_payload(frame, self._landing)
            else:
                landing = self._landing
                self._landing = None
                self._into.done(frame)
                self.wake_peer()
                handler.body_received(self, landing)

    def _receive_payload(self, frame: PipeFrame, landing: Landing) -> int:
        # In pieces, because the sender may be waiting for the lock.
        moved = self._into.move(frame, landing.payload, CHUNK_BYTES)
        self._received_bytes += moved
        return moved

    def _end_unstarted(self) -> None:
        """End without a callback, since there is no handler."""
        self._ended = True
        self._into.retire()

    def _take_unflushed(self) -> list[PipeFrame]:
        frames = self._unflushed
        self._unflushed = []
        self._unflushed_bytes = 0
        return frames

    def _finish(self, handler: LinkHandler, end: PipeEnd) -> None:
        self._ended = True
        self._landing = None
        self._take_unflushed()
        self._out.end(ConnectionLost("the peer ended the link") if end.error else None)
        self._into.retire()
        self.wake_peer()
        try:
            handler.link_closed(self, end.error)
        except Exception:  # noqa: BLE001 - the link has ended all the same
            _log.exception("a link's handler raised in link_closed")


def join(
    connecting: asyncio.AbstractEventLoop,
    accepting: asyncio.AbstractEventLoop,
    pipes: tuple[InprocPipe, InprocPipe],
    address: Address | None,
) -> tuple[InprocLink, InprocLink]:
    """Make the two ends of a link."""
    there, back = pipes
    left = InprocLink(connecting, there, back, address)
    right = InprocLink(accepting, back, there, None)
    left._peer = right  # noqa: SLF001 - the two halves of one thing
    right._peer = left  # noqa: SLF001 - the two halves of one thing
    return left, right


def _check_landing(landing: Landing, frame: PipeFrame) -> None:
    """Refuse a landing that does not fit the frame.

    On a stream, the first such mistake could not be detected, because only the header
    has the length.
    """
    if landing.length != frame.payload_bytes:
        raise UsageError(
            f"landing: {landing.length} bytes do not fit a payload of "
            f"{frame.payload_bytes}"
        )
    if landing.payload is not None and landing.payload.nbytes != landing.length:
        raise UsageError(
            f"landing: a destination of {landing.payload.nbytes} bytes does not fit a "
            f"payload of {landing.length}"
        )


def _owned(payload: Payload) -> memoryview:
    data = memoryview(bytearray(payload.nbytes))
    copy(payload, data)
    return data


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
