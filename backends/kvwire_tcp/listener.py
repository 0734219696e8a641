"""The accept loop, which survives every error.

A wake-up accepts at most ``ACCEPTS_PER_WAKEUP`` connections, so that a flood of
connections leaves time for existing links. Without free descriptors, a connection stays
in the kernel's backlog, and would wake us again at once, for ever. So the listener
stops watching for a moment, and logs that once, until an accept succeeds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

from kvwire.backend import Link, Listener, keep_from_children
from kvwire.backend.contexts import without_context
from kvwire.types import Address
from kvwire_tcp.lane import PendingLanes
from kvwire_tcp.link import TcpLink
from kvwire_tcp.options import address_from, tune
from kvwire_tcp.wire import Wire

ACCEPTS_PER_WAKEUP: Final = 16
# Long compared with a wake-up, short compared with the peer's handshake timeout.
BACKOFF_S: Final = 0.1
# Descriptors or memory are short: trying again at once cannot help.
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_log = logging.getLogger("kvwire.tcp")


class TcpListener(Listener):
    """Accepts connections on a listening socket, which it owns."""

    def __init__(
        self,
        sock: socket.socket,
        accept: Callable[[Link], None],
        wire: Callable[[socket.socket], Wire],
        pending_lanes: PendingLanes,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._sock = sock
        self._accept = accept
        self._wire = wire
        self._pending_lanes = pending_lanes
        self._loop = loop
        self._address = address_from(sock.getsockname())
        self._retry: asyncio.TimerHandle | None = None
        self._exhausted = False
        self._closed = False
        without_context(loop.add_reader, sock, self._on_acceptable)

    @property
    def address(self) -> Address:
        return self._address

    async def close(self) -> None:
        """Stop listening; accepted links continue.

        Cancel safety: safe, it never waits.
        """
        if self._closed:
            return
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def _on_acceptable(self) -> None:
        for _ in range(ACCEPTS_PER_WAKEUP):
            if self._closed:
                return
            try:
                sock, sockaddr = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in _EXHAUSTED:
                    self._back_off(exc)
                    return
                # That connection broke before it was accepted (accept(2)); the next may
                # be intact.
                continue
            keep_from_children(sock)
            self._exhausted = False
            self._hand_over(sock, sockaddr)

    def _hand_over(self, sock: socket.socket, sockaddr: tuple[str, int]) -> None:
        try:
            tune(sock, sockaddr[0])
        except OSError:
            sock.close()  # already reset by the peer
            return
        link = TcpLink(
            self._wire(sock), address_from(sockaddr), self._loop, self._pending_lanes
        )
        try:
            self._accept(link)
        except Exception:  # noqa: BLE001 - the caller's bug ends this link only
            _log.exception(
                "%s: accepting %s failed", self._address, link.remote_address
            )
            link.abort()

    def _back_off(self, error: OSError) -> None:
        if not self._exhausted:
            self._exhausted = True
            _log.error(
                "%s cannot accept (%s); trying again every %g s",
                self._address,
                error,
                BACKOFF_S,
            )
        self._loop.remove_reader(self._sock)
        self._retry = self._loop.call_later(BACKOFF_S, self._resume)

    def _resume(self) -> None:
        self._loop.add_reader(self._sock, self._on_acceptable)
        self._on_acceptable()
