"""Both directions of one connected socket: when to receive, to send, and to end.

::

    made --begin--> OPEN --close()--> CLOSING --queue empty--> SHUT --end of stream--+
     |               |                  |                      |                    |
     | close, abort  +--- end of stream, error, abort(), handler raised ------------+
     v                                                                              v
    socket closed, no callback                            ENDED: `_closed`, then none

*Receiving* is level-triggered: each wake-up receives until the kernel has no more data,
or until its share of bytes or calls is used up; then the loop wakes us again for the
rest. asyncio's own loops also wake us for an error of the socket; on other loops we
query the error each time.

*Sending* happens in ``flush``, at once. Only data that the kernel did not accept waits
for a wake-up; until then further flushes do not touch the socket, since it is full.

A wire inside TLS (:mod:`kvwire_tcp.tls_wire`) holds bytes in both directions. Received
bytes that were not read yet do not show on the socket, so we schedule our own wake-ups.
Encrypted bytes that the kernel has not accepted count as queued. It sends none of our
data until its handshake has ended.

*Ending.* The end of the stream between two frames is a clean end; within a frame, or
with an error of the socket, it is :exc:`~kvwire.errors.ConnectionLost`. To TCP, a
process killed between two frames looks like a clean end: the protocol above must know
whether the end was intended. Inside TLS the end is announced, and a stream that ends
without this counts as lost. When sending fails, data that the peer sent earlier is
received first, since it may contain the reason.

The side that closes continues to receive until the peer's stream ends as well, and a
side that sees the peer's end sends its queue before it ends. So a clean end loses
nothing that was queued, on either side. Every other end resets the connection, so that
the peer does not wait for the rest of a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from abc import ABC, abstractmethod
from typing import Final, TypeAlias

from kvwire.backend.contexts import without_context
from kvwire.errors import AuthenticationFailed, ConnectionLost
from kvwire.limits import CLOSE_TIMEOUT_S, WAKEUP_BYTES
from kvwire.types import Address
from kvwire_tcp.options import reset_on_close
from kvwire_tcp.payloads import PayloadReader
from kvwire_tcp.reader import FrameReader
from kvwire_tcp.wire import PlainWire, Wire
from kvwire_tcp.writer import SendQueue

# A limit on bytes alone does not bound a wake-up: 4 MiB of 64-byte messages are 40,000
# callbacks. 16 calls read at most 128 KiB of small frames, 1,400 of them, in a few
# milliseconds.
CALLS_PER_WAKEUP: Final = 16
# Loops that report a socket's error repeatedly, until it is received.
REPORTING_LOOPS: tuple[type[asyncio.AbstractEventLoop], ...] = (
    asyncio.SelectorEventLoop,
)
# How long a closing link waits while the peer accepts not a single further byte. After
# that the peer counts as gone or stuck, and the link ends with an error.
LINGER_S: Final = CLOSE_TIMEOUT_S

_log = logging.getLogger("kvwire.tcp")

Reader: TypeAlias = FrameReader | PayloadReader


class Duplex(ABC):
    """Sends and receives on a connected socket, which it owns."""

    _reader: Reader

    def __init__(
        self,
        wire: Wire,
        remote: Address,
        loop: asyncio.AbstractEventLoop,
        queue: SendQueue | None = None,
    ) -> None:
        self._wire = wire
        # A plain wire holds no bytes back, in either direction.
        self._plain = isinstance(wire, PlainWire)
        self._sock = wire.sock
        self._remote = remote
        self._loop = loop
        self._asks_for_errors = not isinstance(loop, REPORTING_LOOPS)
        self._queue = SendQueue() if queue is None else queue
        self._started = False
        # A paused link stops watching its socket, because the loop would wake us all
        # the time.
        self._watching = True
        # Whether `_transmit` is running, whose callbacks may send and flush.
        self._transmitting = False
        # Whether a wake-up is due, because the kernel was full or a wake-up's share was
        # used up.
        self._waiting = False
        # Whether nothing more may be queued, after close(), abort() or an error.
        self._closing = False
        # Whether everything was sent, including the end of the stream.
        self._shut = False
        self._end_of_stream = False
        self._ended = False
        # The socket's error; only the bytes that the socket still has are received.
        self._failure: OSError | None = None
        self._linger: asyncio.TimerHandle | None = None
        # A scheduled turn for bytes that the wire holds, which do not show on the
        # socket.
        self._again: asyncio.Handle | None = None

    @abstractmethod
    def _sent(self, token: object) -> None:
        """Called when a payload's memory is free again, with the payload's token."""

    @abstractmethod
    def _writable(self) -> None:
        """Called when the queue is empty after a flush that left some."""

    @abstractmethod
    def _closed(self, error: Exception | None) -> None:
        """Called last, with an error, or with None after a clean end."""

    @property
    def queued_bytes(self) -> int:
        """Return the queued bytes that the kernel has not taken yet."""
        return 0 if self._ended else self._queue.nbytes + self._wire.unsent

    @property
    def received_bytes(self) -> int:
        """Return the bytes received since it began."""
        return self._reader.received_bytes if self._started else 0

    def flush(self) -> None:
        """Send as much of the queue as the kernel takes now."""
        if self._waiting or self._transmitting:
            self._queue.own()
        elif self._queue.nbytes or self._wire.unsent:
            self._transmit()

    def close(self) -> None:
        """Send the queue, then end."""
        if self._closing:
            return
        self._closing = True
        if not self._started:
            self._ended = True
            self._sock.close()
            return
        self._queue.own()
        self._linger = self._loop.call_later(LINGER_S, self._on_linger, self._gone)
        self._loop.call_soon(self._finish)

    def abort(self) -> None:
        """End now."""
        self._end(ConnectionLost("it was aborted on this side"))

    def _begin(self, reader: Reader) -> None:
        """Start receiving, which leads to callbacks."""
        self._started = True
        self._reader = reader
        without_context(self._loop.add_reader, self._sock, self._on_readable)
        if not self._wire.opened:
            # The side that connected sends first.
            self._again = self._loop.call_soon(self._on_more)

    def _detach(self, reason: Exception) -> Wire:
        """Hand over the socket; this duplex has ended, for the given reason."""
        self._quieten(reason)
        return self._wire

    # --- receiving --------------------------------------------------------------------

    def _on_readable(self) -> None:
        reader = self._reader
        if reader.paused and reader.waits:
            self._watching = False
            self._loop.remove_reader(self._sock)
            return
        opened = self._wire.opened
        self._receive()
        if self._ended or self._failure is not None:
            return
        if self._asks_for_errors and (error := self._error()):
            self._socket_failed(error)
            return
        if self._plain:
            return
        if self._wire.opened and not opened and (self._queue.nbytes or self._closing):
            self._wait_for_room()
        elif self._wire.unsent and not self._waiting:
            self._transmit()  # TLS may have to answer
        if self._wire.more:
            self._receive_more()

    def _receive_more(self) -> None:
        """Schedule a turn to receive bytes that the wire still holds."""
        if self._wire.more and self._again is None and self._listens:
            self._again = self._loop.call_soon(self._on_more)

    def _on_more(self) -> None:
        self._again = None
        if self._listens:
            self._on_readable()

    @property
    def _listens(self) -> bool:
        """Return whether anything may still be received."""
        return not (self._ended or self._end_of_stream or self._failure)

    def _receive(self) -> bool:
        """Receive until nothing is left (False), or a wake-up's share is used up."""
        reader = self._reader
        wire = self._wire
        if reader.paused and reader.waits:
            return False
        budget = WAKEUP_BYTES
        # Before: `reader` knows the destination of the next bytes. Each `receive` call
        # receives once; `deliver` then hands over everything that these bytes complete,
        # and may stop or pause us.
        try:
            for _ in range(CALLS_PER_WAKEUP):
                try:
                    count = reader.receive(wire)
                except (BlockingIOError, InterruptedError):
                    return False
                except OSError as exc:
                    self._end(self._broken(exc))
                    return False
                except AuthenticationFailed as exc:
                    self._end(exc.with_traceback(None))
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
        except Exception as exc:  # noqa: BLE001 - a handler's bug ends this only
            self._handler_failed(exc)
            return False
        return True

    def _on_end_of_stream(self) -> None:
        if self._failure is not None:
            self._end(self._broken(self._failure))
        elif position := self._reader.position:
            self._end(
                ConnectionLost(
                    f"{self._remote} ended the connection prematurely, after {position}"
                )
            )
        elif self._shut or not self._wire.opened or self._has_said_all():
            self._end(None)
        else:
            self._end_of_stream = True
            self._loop.remove_reader(self._sock)
            self.close()

    def _has_said_all(self) -> bool:
        """Return whether everything is sent, including TLS's end of stream."""
        if self._closing or self._queue.nbytes:
            return False
        self._wire.send_end()
        with contextlib.suppress(OSError):
            self._wire.flush()
        return self._wire.unsent == 0

    def _error(self) -> OSError | None:
        """Return the socket's error, if it has one.

        libuv stops watching a socket after its first error, which its loops report as
        mere readability. Without this query, nothing would happen after a short read.
        """
        try:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        except OSError as exc:
            return exc
        return OSError(code, os.strerror(code)) if code else None

    # --- sending ----------------------------------------------------------------------

    def _transmit(self) -> None:
        """Send until the queue is empty, the kernel is full, or the share is used."""
        # Before: memory of queued payload is lent or borrowed. After: the tokens of all
        # completely sent frames were given back, and a wake-up is due if something is
        # left.
        queue = self._queue
        wire = self._wire
        budget = WAKEUP_BYTES
        self._transmitting = True
        try:
            for _ in range(CALLS_PER_WAKEUP):
                due = (queue.nbytes and wire.opened) or wire.unsent
                if budget <= 0 or not due:
                    break
                count = 0
                try:
                    if queue.nbytes and wire.opened:
                        count = queue.transmit(wire)
                    else:
                        wire.flush()
                except (BlockingIOError, InterruptedError):
                    break
                except OSError as exc:
                    self._socket_failed(exc)
                    break
                budget -= count
                for token in queue.taken(count):
                    self._sent(token)
                    if self._ended:
                        return
        except Exception as exc:  # noqa: BLE001 - a handler's bug ends this only
            self._handler_failed(exc)
        finally:
            self._transmitting = False
        if queue.nbytes or wire.unsent:
            self._keep_rest()

    def _on_writable(self) -> None:
        self._transmit()
        if self.queued_bytes or not self._waiting:
            return
        self._stop_waiting()
        if self._closing:
            self._shut_down()
            return
        try:
            self._writable()
        except Exception as exc:  # noqa: BLE001 - a handler's bug ends this only
            self._handler_failed(exc)

    def _keep_rest(self) -> None:
        """Copy lent memory in the queue, and wait until there is room."""
        self._queue.own()
        due = self._wire.opened or self._wire.unsent
        if due and self._failure is None and not self._ended:
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._loop.add_writer(self._sock, self._on_writable)

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            self._loop.remove_writer(self._sock)

    # --- ending -----------------------------------------------------------------------

    def _socket_failed(self, error: OSError) -> None:
        """Drop the queue, and receive the data sent before the failure."""
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
        """Start closing: send the queue, unless a wake-up is going to do that."""
        if not self._waiting and not self._ended:
            self._transmit()
            if not self.queued_bytes and self._failure is None:
                self._shut_down()

    def _shut_down(self) -> None:
        """Send the end of the stream, and wait for the peer's."""
        if not self._wire.opened:
            return  # this runs again when it can be sent
        self._wire.send_end()
        if self._wire.unsent:
            self._transmit()
        if self._wire.unsent or self._failure is not None:
            return  # this runs again when there is room
        self._shut = True
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as exc:
            self._end(self._broken(exc))
            return
        if self._end_of_stream:
            self._end(None)
        else:
            self._receive_more()

    @property
    def _gone(self) -> int:
        """Return how many bytes the kernel has accepted; it grows as the peer reads."""
        return self._queue.sent_bytes - self._wire.unsent

    def _on_linger(self, sent_before: int) -> None:
        sent = self._gone
        if sent > sent_before:
            self._linger = self._loop.call_later(LINGER_S, self._on_linger, sent)
            return
        what = f"{self.queued_bytes} bytes unsent" if not self._shut else "all was sent"
        self._end(
            ConnectionLost(
                f"{self._remote} did not end the connection within {LINGER_S:g} s of "
                f"our close ({what})"
            )
        )

    def _handler_failed(self, error: Exception) -> None:
        _log.error(
            "connection to %s: its handler raised; it is aborted",
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
        """End now, from any state."""
        if self._ended:
            return
        self._quieten(error)
        # If the socket already knows that the peer is gone, a reset is not needed. A
        # peer that is refused inside TLS should be able to read the reason, which a
        # reset could overtake.
        if error is not None and not isinstance(error, AuthenticationFailed):
            with contextlib.suppress(OSError):
                reset_on_close(self._sock)
        with contextlib.suppress(OSError):
            self._sock.close()
        # TLS's buffers, 40 KiB and more, are freed now instead of by the garbage
        # collector.
        self._wire = PlainWire(self._sock)

    def _quieten(self, error: Exception | None) -> None:
        """Stop touching memory and socket; `_closed` is called later."""
        self._ended = self._closing = True
        self._queue.clear()
        if not self._started:
            return
        self._reader.stop()
        if self._linger is not None:
            self._linger.cancel()
        if self._again is not None:
            self._again.cancel()
        if not self._loop.is_closed():
            self._stop_waiting()
            self._loop.remove_reader(self._sock)
            self._loop.call_soon(self._report_closed, error)

    def _report_closed(self, error: Exception | None) -> None:
        try:
            self._closed(error)
        except Exception:  # noqa: BLE001 - there is no more to end
            _log.exception(
                "connection to %s: its handler raised at the end", self._remote
            )
