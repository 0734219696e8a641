"""One TCP connection as a link: frames over a socket.

A listener cannot know whether a socket that it accepts is a link or a lane before it
has read from it. So every accepted socket begins as a link, under whatever limits the
protocol above has for strangers, and :class:`FirstHeader` takes those aside that turn
out to be lanes.
"""

from __future__ import annotations

import asyncio
import socket

from kvwire.backend import Landing, Link, LinkHandler, Payload
from kvwire.errors import ConnectionLost
from kvwire.limits import HEADER_BYTES
from kvwire.types import Address
from kvwire_tcp.door import Door
from kvwire_tcp.duplex import Duplex
from kvwire_tcp.preamble import PREAMBLE_BYTES, is_preamble
from kvwire_tcp.reader import FrameHandler, FrameReader


class TcpLink(Duplex, Link):
    """A link over a connected socket, which it owns.

    Args:
        sock: Connected, and tuned by :func:`kvwire_tcp.options.tune`.
        remote: The peer's address.
        loop: The running loop.
        door: Where the socket goes if it turns out to be a lane.
    """

    _handler: LinkHandler

    def __init__(
        self,
        sock: socket.socket,
        remote: Address,
        loop: asyncio.AbstractEventLoop,
        door: Door | None = None,
    ) -> None:
        super().__init__(sock, remote, loop)
        self._door = door

    @property
    def remote_address(self) -> Address | None:
        """See :class:`~kvwire.backend.Link`."""
        return self._remote

    def start(self, handler: LinkHandler) -> None:
        """See :class:`~kvwire.backend.Link`."""
        assert not self._started, "a link is started once"
        assert not self._ended, "a closed link is not started"
        self._handler = handler
        first = FirstHeader(self, handler) if self._door is not None else handler
        self._begin(FrameReader(self, first))

    def send(
        self,
        header: bytes,
        payload: Payload | None = None,
        token: object | None = None,
    ) -> None:
        """See :class:`~kvwire.backend.Link`.

        Raises:
            UsageError: The payload is no view of bytes; nothing was queued.
        """
        if not self._closing:
            self._queue.push(header, payload, token)

    def is_link(self) -> None:
        """A frame has come: from now on its handler is told without a detour."""
        assert isinstance(self._reader, FrameReader)
        self._reader.handler = self._handler

    def is_lane(self, preamble: bytes) -> None:
        """The socket is a lane's: as a link it ends here."""
        assert self._door is not None
        sock = self._detach(ConnectionLost("it is not a connection but a lane of one"))
        self._door.admit(sock, self._remote, preamble)

    def _sent(self, token: object) -> None:
        self._handler.frame_sent(self, token)

    def _writable(self) -> None:
        self._handler.link_writable(self)

    def _closed(self, error: Exception | None) -> None:
        self._handler.link_closed(self, error)


class FirstHeader(FrameHandler):
    """Looks at the first header of an accepted socket."""

    def __init__(self, link: TcpLink, handler: LinkHandler) -> None:
        self._link = link
        self._handler = handler
        self._preamble: bytearray | None = None

    def header_received(self, link: Link, header: memoryview) -> Landing:
        """See FrameHandler."""
        if not is_preamble(header):
            self._link.is_link()
            return self._handler.header_received(link, header)
        self._preamble = bytearray(PREAMBLE_BYTES)
        self._preamble[:HEADER_BYTES] = header
        rest = memoryview(self._preamble)[HEADER_BYTES:]
        return Landing(len(rest), rest)

    def body_received(self, link: Link, landing: Landing) -> None:
        """See FrameHandler."""
        if self._preamble is None:
            self._handler.body_received(link, landing)
        else:
            self._link.is_lane(bytes(self._preamble))
