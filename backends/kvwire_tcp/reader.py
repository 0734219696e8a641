"""Splits received bytes into frames, and writes each byte to its place.

There are two states. **Between payloads**, bytes go into a scratch buffer, so that
several small frames arrive with one system call. Complete frames are handed over from
there, small payloads by a copy; the remaining bytes are the beginning of a header. **In
a payload** that is longer than its part in scratch, bytes go straight to their
destination, and scratch follows it in the same call for the next header. A payload
without a destination goes to scratch too.

::

    header and    +------------------+  more payload than scratch held  +------------+
    payload in    |                  | -------------------------------> |            |
    scratch  +----| between payloads |                                  | in payload |
             +--->|  _landing: None  | <------------------------------- | _rest > 0  |
                  +------------------+    last byte: body_received      +------------+

The previous frame decides how far to read ahead: after a small frame, all of scratch is
requested; after a frame that did not fit into scratch, only a header, since the next
one is probably as large and none of its payload should be copied.

A payload that may land anywhere is handed over in scratch itself if it fills at least
half of that, and other memory becomes scratch; a smaller one is copied, since it would
keep all of scratch alive. After such a payload, scratch has room for another one, so
that one call receives both the header and the payload.

:meth:`FrameReader.receive` makes the one call of the wire, and
:meth:`FrameReader.deliver` handles the received bytes. The result depends only on the
bytes, never on how the network divided them.
"""

from __future__ import annotations

from typing import Final, Protocol

from kvwire.backend import Landing, Link, Payload
from kvwire.errors import UsageError
from kvwire.limits import HEADER_BYTES, KIB, WAKEUP_BYTES
from kvwire.memory.buffers import mid_page_memory
from kvwire.memory.copy import address_of, copy
from kvwire.memory.iovec import Iovecs, simplest
from kvwire_tcp.wire import Wire

# By measurement, a burst of 64-byte frames gains nothing from more. It is also all the
# memory that a peer can pin before it is authenticated.
SCRATCH_BYTES: Final = 8 * KIB
# Payloads up to this size are received with their headers, if they may land anywhere.
_WITH_HEADER_BYTES_MAX: Final = 264 * KIB
# For a payload that is a little larger than the one before.
_MORE_BYTES: Final = 2 * KIB


class FrameHandler(Protocol):
    """Receives incoming frames; the receiving part of a LinkHandler."""

    def header_received(self, link: Link, header: memoryview) -> Landing:
        """As LinkHandler.header_received: returns the destination of the body."""

    def body_received(self, link: Link, landing: Landing) -> None:
        """As LinkHandler.body_received: called when a body is in place."""


class FrameReader:
    """Splits the bytes that one link receives into frames.

    Attributes:
        handler: The receiver of frames; may be replaced, also from within a callback.
        received_bytes: Bytes received since the link began.
        drained: Whether the last call received everything available, or nothing more
            may be handed over.
        paused: Set it to stop handing over headers. After resetting it, call
            ``deliver(0)`` for the headers that have arrived meanwhile.
        stopped: Set by :meth:`stop`, often from within a callback.
    """

    def __init__(self, link: Link, handler: FrameHandler) -> None:
        self._link = link
        self.handler = handler
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        # Handlers get read-only views of it.
        self._headers = self._scratch.toreadonly()
        # The bytes that scratch has at its next use, and the number of them to request.
        self._size = SCRATCH_BYTES
        self._ahead = SCRATCH_BYTES
        # Bytes kept at the front of scratch: between payloads, a part of a header.
        self._held = 0
        self._landing: Landing | None = None
        # The part of a header that had arrived when the reader was stopped.
        self._left = b""
        # The missing payload bytes of the landing, and their destination; None drops
        # them.
        self._rest = 0
        self._target: memoryview | Iovecs | None = None
        self.received_bytes = 0
        self.drained = False
        self.paused = False
        self.stopped = False

    @property
    def waits(self) -> bool:
        """Return whether it is paused between two frames."""
        return self.paused and self._landing is None

    @property
    def position(self) -> str:
        """Return the progress of the current frame as text; "" between frames."""
        if self._landing is not None:
            length = self._landing.length
            return f"{length - self._rest} of {length} payload bytes"
        return f"{self._held} of {HEADER_BYTES} header bytes" if self._held else ""

    @property
    def beginning(self) -> bytes:
        """Return the bytes of an incomplete header."""
        if self.stopped or self._landing is not None:
            return self._left
        return bytes(self._headers[: min(self._held, HEADER_BYTES)])

    def stop(self) -> None:
        """Deliver nothing more, and drop all references to payload memory."""
        self._left = self.beginning
        self.stopped = True
        self._held = 0
        self._landing = self._target = None

    def receive(self, wire: Wire) -> int:
        """Receive once, to the place of the next bytes; return their number."""
        target = self._target
        rest = self._rest
        ahead = self._ahead
        if target is None:
            if ahead > len(self._scratch) or len(self._scratch) > 2 * self._size:
                self._replace_scratch(0, self._held)
            room = self._scratch
            asked = ahead - self._held
            if asked < len(room):
                room = room[self._held : ahead]
            count = wire.recv_into(room)
        elif type(target) is Iovecs:
            ahead = min(ahead, len(self._scratch))
            tail = (address_of(self._scratch), ahead)
            count = wire.recv_list(target, tail)
            asked = target.asked
        elif rest > WAKEUP_BYTES:
            asked = WAKEUP_BYTES
            begin = len(target) - rest
            count = wire.recv_into(target[begin : begin + asked])
        else:
            ahead = min(ahead, len(self._scratch))
            asked = rest + ahead
            count = wire.recv_two(target[len(target) - rest :], self._scratch[:ahead])
        self.drained = count < asked and not wire.more
        self.received_bytes += count
        return count

    def deliver(self, count: int) -> None:
        """Report to the handler everything that the last ``count`` bytes complete."""
        landing = self._landing
        if landing is None:
            self._split(0, self._held + count)
            return
        rest = self._rest
        if count < rest:
            self._rest = rest - count
            if type(self._target) is Iovecs:
                self._target.rest -= count
            return
        dropped = self._target is None
        if landing.anywhere:
            self._ahead = self._size
        # Keep no reference to memory that the handler is about to get back.
        self._landing = self._target = None
        self.handler.body_received(self._link, landing)
        if self.stopped:
            return
        if dropped:  # dropped bytes are in scratch, before the bytes that follow them
            self._split(rest, count)
        elif count > rest:
            self._split(0, count - rest)
        else:
            self._held = 0

    def _split(self, begin: int, end: int) -> None:
        """Hand over the frames in ``scratch[begin:end]``, and keep the rest."""
        link = self._link
        handler = self.handler
        scratch = self._scratch
        headers = self._headers
        self._held = end
        # A callback may call `stop`, which sets `_held` to 0.
        while not self.paused and (body := begin + HEADER_BYTES) <= self._held:
            landing = handler.header_received(link, headers[begin:body])
            if self.stopped:
                return
            length = landing.length
            payload = landing.payload
            begin = body + length
            if begin > end:
                self._held = 0
                self._enter(landing, scratch[body:end])
                return
            # Slice assignment refuses other lengths and formats by itself.
            if type(payload) is memoryview:
                payload[:] = scratch[body:begin]
            elif length and payload is not None:
                copy(scratch[body:begin], payload)
            elif length and landing.anywhere:
                self._size = _size_for(length)
                if 2 * length >= len(scratch):
                    landing.payload = scratch[body:begin]
                    end = self._replace_scratch(begin, end)
                    begin = 0
                    scratch = self._scratch
                    headers = self._headers
                else:
                    payload = landing.payload = mid_page_memory(length).data
                    payload[:] = scratch[body:begin]
            self._ahead = self._size
            handler.body_received(link, landing)
        if self.stopped:
            return
        self.drained = self.drained or self.paused
        self._held = end - begin
        if begin and begin < end:
            scratch[: end - begin] = scratch[begin:end]

    def _replace_scratch(self, begin: int, end: int) -> int:
        """Make other memory scratch, and keep ``scratch[begin:end]`` at its front."""
        before = self._scratch
        self._scratch = mid_page_memory(max(self._size, end - begin)).data
        self._headers = self._scratch.toreadonly()
        self._held = end - begin
        if begin < end:
            self._scratch[: end - begin] = before[begin:end]
        return self._held

    def _enter(self, landing: Landing, arrived: memoryview) -> None:
        """Begin a payload that has only the bytes ``arrived`` so far."""
        payload = landing.payload
        length = landing.length
        self._ahead = self._size
        if landing.anywhere:
            payload = landing.payload = mid_page_memory(length).data
            self._size = _size_for(length)
            self._ahead = HEADER_BYTES
        elif payload is not None:
            if length > SCRATCH_BYTES:
                self._ahead = HEADER_BYTES
            if not isinstance(payload, memoryview):
                check_destination(payload, length)
                payload = simplest(payload)
            elif (
                payload.nbytes != length
                or payload.readonly
                or payload.format != "B"
                or payload.ndim != 1
            ):
                check_destination(payload, length)
        if isinstance(payload, memoryview):
            payload[: len(arrived)] = arrived
            self._target = payload
        elif payload is not None:
            self._target = target = Iovecs(payload)
            if arrived:
                target.fill(arrived)
        self._landing = landing
        self._rest = length - len(arrived)


def _size_for(length: int) -> int:
    """Return the size of scratch in which the next payload may be as long."""
    if length > _WITH_HEADER_BYTES_MAX:
        return SCRATCH_BYTES
    return max(SCRATCH_BYTES, HEADER_BYTES + length + _MORE_BYTES)


def check_destination(payload: Payload, length: int) -> None:
    """Refuse memory that cannot receive a payload.

    Raises:
        UsageError: It has another length, is read-only, or is not a view of bytes.
    """
    if payload.nbytes != length:
        raise UsageError(
            f"landing: a destination of {payload.nbytes} bytes does not fit a payload "
            f"of {length}"
        )
    if not isinstance(payload, memoryview):
        if not payload.writable:
            raise UsageError("landing: the destination's fragments are read-only")
    elif payload.readonly or payload.format != "B" or payload.ndim != 1:
        raise UsageError(
            "landing: the destination is not a writable 1-D view of bytes (format "
            f"{payload.format!r}, read-only: {payload.readonly})"
        )
