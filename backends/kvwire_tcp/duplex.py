"""Both directions of one connected socket: when to receive, to send, and how it ends.

::

    made --begin--> OPEN --close()--> CLOSING --queue empty--> SHUT --end of stream--+
      |               |                  |                      |                    |
      | close, abort  +--- end of stream, error, abort(), handler raised ------------+
      v                                                                              v
    socket closed, no callback                            ENDED: `_closed`, then none

*Receiving* is level-triggered: each wake-up receives until the kernel has no more, or
its share of bytes or calls is spent, and the loop wakes us again for the rest. For an
error of the socket too, on asyncio's own loops; on others it is asked for each time.

*Sending* happens in ``flush``, at once. Only what the kernel did not take waits for a
wake-up; until then further flushes leave the socket alone, since it is full.

A wire inside TLS (:mod:`kvwire_tcp.tls_wire`) holds bytes on both ways: what it has
received and nobody has read, of which the socket will not tell us, so we wake
ourselves; and what it has encrypted and the kernel has not taken, which counts as
queued. Until its handshake is over it sends nothing of ours.

*Ending.* The end of the stream between two frames is a clean end; within a frame, or by
an error of the socket, it is :exc:`~kvwire.errors.ConnectionLost`. A process that is
killed between two frames ends its links cleanly, as far as TCP can tell: whether that
was meant, the protocol above must say. Inside TLS the end is said, and a stream that
ends otherwise is lost. When sending fails, what the peer sent before is
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
from abc import ABC, abstractmethod
from typing import Final, TypeAlias

from kvwire.errors import AuthenticationFailed, ConnectionLost
from kvwire.limits import CLOSE_TIMEOUT_S, WAKEUP_BYTES
from kvwire.types import Address
from kvwire_tcp.options import reset_on_close
from kvwire_tcp.payloads import PayloadReader
from kvwire_tcp.reader import FrameReader
from kvwire_tcp.wire import PlainWire, Wire
from kvwire_tcp.writer import SendQueue

# Bytes alone do not bound a wake-up: 4 MiB of 64-byte messages are 40,000 callbacks.
# 16 calls read at most 128 KiB of small frames, 1,400 of them, in some milliseconds.
CALLS_PER_WAKEUP: Final = 16
# Loops that tell of a socket's error again and again, until it is received.
TELLING_LOOPS: tuple[type[asyncio.AbstractEventLoop], ...] = (
    asyncio.SelectorEventLoop,
)
# How long a closing link waits for the peer without sending one byte more. Then the
# peer is gone or stuck, and the link ends with an error.
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
        # It holds nothing back, on neither way.
        self._plain = isinstance(wire, PlainWire)
        self._sock = wire.sock
        self._remote = remote
        self._loop = loop
        self._asks_for_errors = not isinstance(loop, TELLING_LOOPS)
        self._queue = SendQueue() if queue is None else queue
        self._started = False
        # Paused links look away, or the loop would wake us for what may not be read.
        self._watching = True
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
        # The wire holds something to be received, of which the socket knows nothing.
        self._again: asyncio.Handle | None = None

    @abstractmethod
    def _sent(self, token: object) -> None:
        """Report that what was queued with a token is not needed any more."""

    @abstractmethod
    def _writable(self) -> None:
        """Report that the queue is empty after a flush that left some."""

    @abstractmethod
    def _closed(self, error: Exception | None) -> None:
        """Report the end, with an error or clean; the last callback."""

    @property
    def queued_bytes(self) -> int:
        """Return the bytes queued and not yet taken by the kernel."""
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
        """Send what is queued, then end."""
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
        """Begin to call back."""
        self._started = True
        self._reader = reader
        self._loop.add_reader(self._sock, self._on_readable)
        if not self._wire.opened:
            # Whoever dialled has the first word.
            self._again = self._loop.call_soon(self._on_more)

    def _detach(self, reason: Exception) -> Wire:
        """Give the socket away; this has ended, for the reason given."""
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
            self._transmit()  # what TLS has answered by itself
        if self._wire.more:
            self._receive_more()

    def _receive_more(self) -> None:
        """Receive what the wire still holds, in a turn of its own."""
        if self._wire.more and self._again is None and self._listens:
            self._again = self._loop.call_soon(self._on_more)

    def _on_more(self) -> None:
        self._again = None
        if self._listens:
            self._on_readable()

    @property
    def _listens(self) -> bool:
        """Tell whether there is anything that may still be received."""
        return not (self._ended or self._end_of_stream or self._failure)

    def _receive(self) -> bool:
        """Receive until there is no more (False) or a wake-up is spent (True)."""
        reader, wire = self._reader, self._wire
        if reader.paused and reader.waits:
            return False
        budget = WAKEUP_BYTES
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
                    f"{self._remote} ended the connection in the middle, after "
                    f"{position}"
                )
            )
        elif self._shut or not self._wire.opened or self._has_said_all():
            self._end(None)
        else:
            self._end_of_stream = True
            self._loop.remove_reader(self._sock)
            self.close()

    def _has_said_all(self) -> bool:
        """Tell whether all is sent; inside TLS, the end of the stream too."""
        if self._closing or self._queue.nbytes:
            return False
        self._wire.say_end()
        with contextlib.suppress(OSError):
            self._wire.flush()
        return self._wire.unsent == 0

    def _error(self) -> OSError | None:
        """Return the socket's error, if it has one.

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
        queue, wire, budget = self._queue, self._wire, WAKEUP_BYTES
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
        """Keep what was not sent, until there is room for it."""
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
        """Begin to close: send the queue, if nobody does."""
        if not self._waiting and not self._ended:
            self._transmit()
            if not self.queued_bytes and self._failure is None:
                self._shut_down()

    def _shut_down(self) -> None:
        """Tell the peer that nothing follows, and wait for it to end as well."""
        if not self._wire.opened:
            return  # we come back when it can be told
        self._wire.say_end()
        if self._wire.unsent:
            self._transmit()
        if self._wire.unsent or self._failure is not None:
            return  # we come back when there is room
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
        """Return how many bytes the kernel took; it grows as the peer reads."""
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
        # The socket may already know that the peer is gone; there is nothing to add.
        # Whoever is refused inside TLS is to read why, which a reset may overtake.
        if error is not None and not isinstance(error, AuthenticationFailed):
            with contextlib.suppress(OSError):
                reset_on_close(self._sock)
        with contextlib.suppress(OSError):
            self._sock.close()
        # What TLS holds, 40 KiB and more, is not to wait for the garbage collector.
        self._wire = PlainWire(self._sock)

    def _quieten(self, error: Exception | None) -> None:
        """Touch neither memory nor socket any more; `_closed` follows."""
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
            self._loop.call_soon(self._tell_closed, error)

    def _tell_closed(self, error: Exception | None) -> None:
        try:
            self._closed(error)
        except Exception:  # noqa: BLE001 - there is no more to end
            _log.exception(
                "connection to %s: its handler raised at the end", self._remote
            )
