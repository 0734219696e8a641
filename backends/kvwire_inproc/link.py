"""The reference link: the contract of :mod:`kvwire.backend` as executable text.

Everything a link tells its handler is told from :meth:`InprocLink._turn`, which runs on
the link's own loop, so no callback comes from inside a call. Calls change the state and
wake the link, or its peer, for a turn. A turn does, in this order:

1. report the frames that the peer has received: their memory is free (``frame_sent``);
2. say that the queue is empty, if somebody has reason to wait for it;
3. receive up to ``WAKEUP_BYTES``: ask the handler where each payload goes, and copy it
   there from the sender's memory *at this moment*. A sender that reuses memory before
   ``frame_sent`` therefore delivers wrong bytes, always, instead of once in a while;
4. end, if this side aborted, or the peer has ended and nothing of it is left to
   receive.

A close by both sides at once loses nothing: a closing link goes on receiving, and a
link that has itself been closed ends only when its own queue has been received as well.
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
    """Implements one end of a pair; made by :func:`join`."""

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
        # A flush has left bytes: the handler is told when none are left.
        self._waiting = False
        self._closing = False
        # Set when this side decides to end, at once; the next turn tells the handler.
        self._ending: PipeEnd | None = None
        self._ended = False
        # The frame whose header the handler has seen, and where its payload goes.
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
                f"send: a payload of {frame.payload_bytes} bytes needs a token; up to "
                f"{EAGER_BYTES_MAX} bytes go without"
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
        """Have a turn soon; from any thread."""
        if self._woken:
            return
        self._woken = True
        if _running_loop() is self._loop:
            self._loop.call_soon(self._turn)
        else:
            self._loop.call_soon_threadsafe(self._turn)

    def wake_peer(self) -> None:
        """Give the peer a turn soon; if its loop is gone, end this side."""
        try:
            self._peer.wake()
        except RuntimeError:  # its loop is closed, so nobody is there any more
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
                # Released at once: who keeps the view shall notice.
                with memoryview(frame.header) as header:
                    self._landing = handler.header_received(self, header)
                if self._ending is None:
                    _check_landing(self._landing, frame)
            elif frame.moved < frame.payload_bytes:
                budget -= self._receive_payload(frame, self._landing)
            else:
                landing, self._landing = self._landing, None
                self._into.done(frame)
                self.wake_peer()
                handler.body_received(self, landing)

    def _receive_payload(self, frame: PipeFrame, landing: Landing) -> int:
        # In pieces, since the sender may wait for the lock.
        moved = self._into.move(frame, landing.payload, CHUNK_BYTES)
        self._received_bytes += moved
        return moved

    def _end_unstarted(self) -> None:
        """End without a callback: there is no handler to tell."""
        self._ended = True
        self._into.retire()

    def _take_unflushed(self) -> list[PipeFrame]:
        frames, self._unflushed = self._unflushed, []
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
    left._peer, right._peer = right, left  # noqa: SLF001 - the two halves of one thing
    return left, right


def _check_landing(landing: Landing, frame: PipeFrame) -> None:
    """Refuse a landing that does not fit.

    A stream could not tell the first mistake, since only the header knows the length.
    """
    if landing.length != frame.payload_bytes:
        raise UsageError(
            f"landing: {landing.length} bytes for a payload of {frame.payload_bytes}"
        )
    if landing.payload is not None and landing.payload.nbytes != landing.length:
        raise UsageError(
            f"landing: a destination of {landing.payload.nbytes} bytes for a payload "
            f"of {landing.length}"
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
