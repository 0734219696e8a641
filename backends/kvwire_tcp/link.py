"""One TCP connection as a link: when to receive, when to send, and how it ends.

::

    made --start--> OPEN --close()--> CLOSING --queue empty--> SHUT --end of stream--+
      |               |                  |                      |                    |
      | close, abort  +--- end of stream, error, abort(), handler raised ------------+
      v                                                                              v
    socket closed, no callback                            ENDED: link_closed, then none

*Receiving* is level-triggered: each wake-up receives until the kernel has no more, or
its share of bytes or calls is spent, and the loop wakes us again for the rest. An error
of the socket must be asked for each time, since loops differ there.

*Sending* happens in ``flush``, at once. Only what the kernel did not take waits for a
wake-up; until then further flushes leave the socket alone, since it is full.

*Ending.* The end of the stream between two frames is a clean end; within a frame, or by
an error of the socket, it is :exc:`~kvwire.errors.ConnectionLost`. A process that is
killed between two frames ends its links cleanly, as far as TCP can tell: whether that
was meant, the protocol above must say. When sending fails, what the peer sent before is
received first, since it may say why.

Whoever closed goes on receiving until the peer's stream ends as well, and whoever sees
the peer's end sends what it has queued before it ends. So a clean end loses nothing
that was queued, on either side. Every other end resets the connection: the peer must
not take half a frame for silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import Final

from kvwire.backend import Link, LinkHandler, Payload
from kvwire.errors import ConnectionLost
from kvwire.limits import CLOSE_TIMEOUT_S, WAKEUP_BYTES
from kvwire.types import Address
from kvwire_tcp.options import reset_on_close
from kvwire_tcp.reader import FrameReader
from kvwire_tcp.writer import SendQueue

# Bytes alone do not bound a wake-up: 4 MiB of 64-byte messages are 40,000 callbacks.
# 16 calls read at most 128 KiB of small frames, 1,400 of them, in some milliseconds.
CALLS_PER_WAKEUP: Final = 16
# How long a closing link waits for the peer without sending one byte more. Then the
# peer is gone or stuck, and the link ends with an error.
LINGER_S: Final = CLOSE_TIMEOUT_S

_log = logging.getLogger("kvwire.tcp")


class TcpLink(Link):
    """A link over a connected socket, which it owns.

    Args:
        sock: Connected, and tuned by :func:`kvwire_tcp.options.tune`.
        remote: The peer's address.
        loop: The running loop.
    """

    _handler: LinkHandler
    _reader: FrameReader

    def __init__(
        self, sock: socket.socket, remote: Address, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._sock = sock
        self._remote = remote
        self._loop = loop
        self._queue = SendQueue()
        self._started = False
        # Within `_transmit`, whose callbacks may send and flush.
        self._transmitting = False
        # The kernel had no room, or the wake-up's bytes were spent: a wake-up is due.
        self._waiting = False
        # No more is queued: close(), abort() or an error came.
        self._closing = False
        # All was sent, and the peer knows that this is the end.
        self._shut = False
        self._end_of_stream = False
        self._ended = False
        # The socket has failed, and only what it still holds is received.
        self._failure: OSError | None = None
        self._linger: asyncio.TimerHandle | None = None

    @property
    def queued_bytes(self) -> int:
        """See :class:`~kvwire.backend.Link`."""
        return self._queue.nbytes

    @property
    def received_bytes(self) -> int:
        """See :class:`~kvwire.backend.Link`."""
        return self._reader.received_bytes if self._started else 0

    @property
    def remote_address(self) -> Address | None:
        """See :class:`~kvwire.backend.Link`."""
        return self._remote

    def start(self, handler: LinkHandler) -> None:
        """See :class:`~kvwire.backend.Link`."""
        assert not self._started, "a link is started once"
        assert not self._ended, "a closed link is not started"
        self._started = True
        self._handler = handler
        self._reader = FrameReader(self, handler)
        self._loop.add_reader(self._sock, self._on_readable)

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

    def flush(self) -> None:
        """See :class:`~kvwire.backend.Link`."""
        if self._waiting or self._transmitting:
            self._queue.own()
        else:
            self._transmit()

    def close(self) -> None:
        """See :class:`~kvwire.backend.Link`."""
        if self._closing:
            return
        self._closing = True
        if not self._started:
            self._ended = True
            self._sock.close()
            return
        self._queue.own()
        self._linger = self._loop.call_later(
            LINGER_S, self._on_linger, self._queue.sent_bytes
        )
        self._loop.call_soon(self._finish)

    def abort(self) -> None:
        """See :class:`~kvwire.backend.Link`."""
        self._end(ConnectionLost("the link was aborted on this side"))

    # --- receiving --------------------------------------------------------------------

    def _on_readable(self) -> None:
        self._receive()
        if not self._ended and self._failure is None and (error := self._error()):
            self._socket_failed(error)

    def _receive(self) -> bool:
        """Receive until the kernel has no more (False) or a wake-up is spent (True)."""
        reader, sock = self._reader, self._sock
        budget = WAKEUP_BYTES
        try:
            for _ in range(CALLS_PER_WAKEUP):
                try:
                    count = reader.receive(sock)
                except (BlockingIOError, InterruptedError):
                    return False
                except OSError as exc:
                    self._end(self._broken(exc))
                    return False
                if count == 0:
                    self._on_end_of_stream()
                    return False
                budget -= count
                reader.deliver(count)
                if reader.drained or reader.stopped:
                    return False
                if budget <= 0:
                    break
        except Exception as exc:  # noqa: BLE001 - a handler's bug ends its link only
            self._handler_failed(exc)
            return False
        return True

    def _on_end_of_stream(self) -> None:
        if self._failure is not None:
            self._end(self._broken(self._failure))
        elif position := self._reader.position:
            self._end(
                ConnectionLost(
                    f"{self._remote} ended the connection within a frame, after "
                    f"{position}"
                )
            )
        elif self._shut or not (self._closing or self._queue.nbytes):
            self._end(None)
        else:
            self._end_of_stream = True
            self._loop.remove_reader(self._sock)
            self.close()

    def _error(self) -> OSError | None:
        """The socket's error, if it has one.

        libuv stops watching a socket with its first error, of which its loops only tell
        us that something can be read. A short read would be the last we hear of it.
        """
        try:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        except OSError as exc:
            return exc
        return OSError(code, os.strerror(code)) if code else None

    # --- sending ----------------------------------------------------------------------

    def _transmit(self) -> None:
        """Send until the queue is empty, the kernel is full, or a wake-up is spent."""
        queue, sock = self._queue, self._sock
        budget = WAKEUP_BYTES
        self._transmitting = True
        try:
            for _ in range(CALLS_PER_WAKEUP):
                if budget <= 0 or queue.nbytes == 0:
                    break
                try:
                    count = queue.transmit(sock)
                except (BlockingIOError, InterruptedError):
                    break
                except OSError as exc:
                    self._socket_failed(exc)
                    return
                budget -= count
                for token in queue.taken(count):
                    self._handler.frame_sent(self, token)
                    if self._ended:
                        return
        except Exception as exc:  # noqa: BLE001 - a handler's bug ends its link only
            self._handler_failed(exc)
        finally:
            self._transmitting = False
        if queue.nbytes:
            queue.own()
            if not self._waiting:
                self._waiting = True
                self._loop.add_writer(sock, self._on_writable)

    def _on_writable(self) -> None:
        self._transmit()
        if self._queue.nbytes or not self._waiting:
            return
        self._stop_waiting()
        if self._closing:
            self._shut_down()
            return
        try:
            self._handler.link_writable(self)
        except Exception as exc:  # noqa: BLE001 - a handler's bug ends its link only
            self._handler_failed(exc)

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self._loop.remove_writer(self._sock)

    # --- ending -----------------------------------------------------------------------

    def _socket_failed(self, error: OSError) -> None:
        """Drop the queue, and receive what the peer sent before it went."""
        self._failure = error
        self._closing = True
        self._queue.clear()
        self._stop_waiting()
        self._loop.remove_reader(self._sock)
        self._loop.call_soon(self._receive_last, error)

    def _receive_last(self, error: OSError) -> None:
        if not self._ended and self._receive():
            self._loop.call_soon(self._receive_last, error)
        else:
            self._end(self._broken(error))

    def _finish(self) -> None:
        """First step of a close: send the queue, if nobody does."""
        if not self._waiting and not self._ended:
            self._transmit()
            if not self._queue.nbytes and self._failure is None:
                self._shut_down()

    def _shut_down(self) -> None:
        """Tell the peer that nothing follows, and wait for it to end as well."""
        self._shut = True
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as exc:
            self._end(self._broken(exc))
            return
        if self._end_of_stream:
            self._end(None)

    def _on_linger(self, sent_before: int) -> None:
        sent = self._queue.sent_bytes
        if sent > sent_before:
            self._linger = self._loop.call_later(LINGER_S, self._on_linger, sent)
            return
        what = (
            f"{self._queue.nbytes} bytes unsent" if not self._shut else "all was sent"
        )
        self._end(
            ConnectionLost(
                f"{self._remote} did not end the connection within {LINGER_S:g} s of "
                f"our close ({what})"
            )
        )

    def _handler_failed(self, error: Exception) -> None:
        _log.error(
            "link to %s: its handler raised; the link is aborted",
            self._remote,
            exc_info=error,
        )
        self._end(error)

    def _broken(self, error: OSError) -> ConnectionLost:
        lost = ConnectionLost(f"connection to {self._remote} broke: {error}")
        # Its traceback would keep the payload alive that was being moved.
        lost.__cause__ = error.with_traceback(None)
        return lost

    def _end(self, error: Exception | None) -> None:
        """End the link now, from any state; link_closed follows."""
        if self._ended:
            return
        self._ended = self._closing = True
        self._queue.clear()
        if self._started:
            self._reader.stop()
            if self._linger is not None:
                self._linger.cancel()
            if not self._loop.is_closed():
                self._stop_waiting()
                self._loop.remove_reader(self._sock)
                self._loop.call_soon(self._tell_closed, error)
        # The socket may already know that the peer is gone; there is nothing to add.
        if error is not None:
            with contextlib.suppress(OSError):
                reset_on_close(self._sock)
        with contextlib.suppress(OSError):
            self._sock.close()

    def _tell_closed(self, error: Exception | None) -> None:
        try:
            self._handler.link_closed(self, error)
        except Exception:  # noqa: BLE001 - there is no more to end
            _log.exception(
                "link to %s: its handler raised in link_closed", self._remote
            )
