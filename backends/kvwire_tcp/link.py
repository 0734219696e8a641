"""One TCP connection as a link: frames over a socket.

A listener cannot know whether an accepted socket is a link or a lane before reading
from it. So every accepted socket begins as a link, under the protocol's limits for
unauthenticated connections, and :class:`FirstHeader` separates the sockets that turn
out to be lanes.
"""

from __future__ import annotations

import asyncio

from kvwire.backend import Landing, LaneArrived, Link, LinkHandler, Payload
from kvwire.backend.contexts import without_context
from kvwire.kv.fragments import Fragments
from kvwire.limits import HEADER_BYTES
from kvwire.memory.iovec import Iovecs, simplest
from kvwire.types import Address, PeerIdentity
from kvwire_tcp.duplex import Duplex
from kvwire_tcp.lane import PendingLanes
from kvwire_tcp.preamble import PREAMBLE_BYTES, is_preamble
from kvwire_tcp.reader import FrameHandler, FrameReader
from kvwire_tcp.wire import Wire
from kvwire_tcp.writer import JOINED_BYTES_MAX


class TcpLink(Duplex, Link):
    """A link over a connected socket, which it owns."""

    pausable = True
    brings_memory = True
    _handler: LinkHandler
    _frames: FrameReader

    def __init__(
        self,
        wire: Wire,
        remote: Address,
        loop: asyncio.AbstractEventLoop,
        pending_lanes: PendingLanes | None = None,
    ) -> None:
        super().__init__(wire, remote, loop)
        self._pending_lanes = pending_lanes
        self._resuming: asyncio.Handle | None = None

    @property
    def remote_address(self) -> Address | None:
        return self._remote

    @property
    def beginning(self) -> bytes:
        return self._frames.beginning if self._started else b""

    def proven(self) -> PeerIdentity | None:
        return self._wire.proven()

    def start(self, handler: LinkHandler) -> None:
        assert not self._started, "a link is started once"
        assert not self._ended, "a closed link is not started"
        self._handler = handler
        first = (
            FirstHeader(self, handler) if self._pending_lanes is not None else handler
        )
        self._frames = FrameReader(self, first)
        self._begin(self._frames)

    def send(
        self,
        header: bytes,
        payload: Payload | None = None,
        token: object | None = None,
    ) -> None:
        if not self._closing:
            self._queue.push(header, payload, token)

    def send_now(
        self,
        header: bytes,
        payload: Payload | None = None,
        token: object | None = None,
    ) -> bool:
        queue = self._queue
        if queue.nbytes or not self._plain or self._closing or self._transmitting:
            self.send(header, payload, token)
            return False
        if isinstance(payload, Fragments):
            payload = simplest(payload)
        nbytes = HEADER_BYTES + (0 if payload is None else payload.nbytes)
        wire = self._wire
        try:
            if payload is None:
                taken = wire.send(header)
            elif not isinstance(payload, memoryview):
                taken = wire.send_list(Iovecs(payload, header))
            elif nbytes <= JOINED_BYTES_MAX:
                taken = wire.send(b"".join((header, payload)))
            else:
                taken = wire.sendmsg((header, payload))
        except (BlockingIOError, InterruptedError):
            taken = 0
        except OSError as exc:
            self._socket_failed(exc)
            return False
        if taken == nbytes:
            queue.sent_bytes += taken
            return True
        queue.push(header, payload, token)
        queue.taken(taken)
        self._wait_for_room()
        return False

    def pause(self) -> None:
        self._frames.paused = True
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None

    def resume(self) -> None:
        if self._resuming is None and not self._ended:
            self._resuming = self._loop.call_soon(self._go_on)

    def is_link(self) -> None:
        """From now on pass frames directly to the handler: this is a link."""
        self._frames.handler = self._handler

    def is_lane(self, preamble: bytes) -> None:
        """End the link, because the socket belongs to a lane."""
        assert self._pending_lanes is not None
        wire = self._detach(LaneArrived("a lane of a connection has arrived"))
        self._pending_lanes.claim_socket(wire, self._remote, preamble)

    def _go_on(self) -> None:
        """Deliver frames that arrived during a pause, and watch the socket again."""
        self._resuming = None
        if self._ended:
            return
        self._frames.paused = False
        try:
            self._frames.deliver(0)
        except Exception as exc:  # noqa: BLE001 - a handler's bug ends this only
            self._handler_failed(exc)
            return
        if not self._watching and self._listens:
            self._watching = True
            without_context(self._loop.add_reader, self._sock, self._on_readable)
        self._receive_more()

    def _sent(self, token: object) -> None:
        self._handler.frame_sent(self, token)

    def _writable(self) -> None:
        self._handler.link_writable(self)

    def _closed(self, error: Exception | None) -> None:
        self._handler.link_closed(self, error)


class FirstHeader(FrameHandler):
    """Checks the first header of an accepted socket."""

    def __init__(self, link: TcpLink, handler: LinkHandler) -> None:
        self._link = link
        self._handler = handler
        self._preamble: bytearray | None = None

    def header_received(self, link: Link, header: memoryview) -> Landing:
        if not is_preamble(header):
            self._link.is_link()
            return self._handler.header_received(link, header)
        self._preamble = bytearray(PREAMBLE_BYTES)
        self._preamble[:HEADER_BYTES] = header
        rest = memoryview(self._preamble)[HEADER_BYTES:]
        return Landing(len(rest), rest)

    def body_received(self, link: Link, landing: Landing) -> None:
        if self._preamble is None:
            self._handler.body_received(link, landing)
        else:
            self._link.is_lane(bytes(self._preamble))
