"""Receives a lane's payloads, which are a plain byte stream without frames.

Payloads arrive in the order in which they were expected, one directly after another,
and each straight into its destination. Bytes that are not expected yet stay in the
kernel, since payload can overtake the control link that announces it. So a peer that
sends more than it has announced fills a TCP window, but none of our memory.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from typing import Final

from kvwire.backend import Landing
from kvwire.limits import KIB, WAKEUP_BYTES
from kvwire.memory.iovec import Iovecs, simplest
from kvwire_tcp.reader import check_destination
from kvwire_tcp.wire import Wire

# A payload without a destination is received into this many bytes at a time.
_DROPPED_BYTES: Final = 64 * KIB


class PayloadReader:
    """Receives the payloads of one lane."""

    # A paused lane removes its reader from the loop, so this stays False.
    paused = waits = False

    def __init__(
        self, received: Callable[[Landing], None], early: Callable[[], None]
    ) -> None:
        self._received = received
        self._early = early
        # The first landing is being received: `_rest` bytes of it are missing, and go
        # to `_target`.
        self._expected: deque[Landing] = deque()
        self._rest = 0
        self._target: memoryview | Iovecs | None = None
        self.received_bytes = 0
        self.drained = False
        self.stopped = False

    @property
    def position(self) -> str:
        """Return the progress of the expected payload as text; "" if there is none."""
        if not self._expected:
            return ""
        length = self._expected[0].length
        more = len(self._expected) - 1
        return f"{length - self._rest} of {length} payload bytes, {more} more expected"

    def expect(self, landing: Landing) -> None:
        """Add an expected payload."""
        assert landing.length, "a payload has at least one byte"
        if landing.payload is not None:
            check_destination(landing.payload, landing.length)
        self._expected.append(landing)
        if len(self._expected) == 1:
            self._enter(landing)

    def stop(self) -> None:
        """Deliver nothing more, and drop all references to payload memory."""
        self.stopped = True
        self._expected.clear()
        self._target = None

    def receive(self, wire: Wire) -> int:
        """Receive once, into the next payload; return the bytes received."""
        if not self._expected:
            return self._look(wire)
        target = self._target
        rest = self._rest
        if type(target) is Iovecs:
            count = wire.recv_list(target)
            asked = target.asked
        elif target is None:
            asked = min(rest, _DROPPED_BYTES)
            count = wire.recv_into(memoryview(bytearray(asked)))
        else:
            asked = min(rest, WAKEUP_BYTES)
            begin = len(target) - rest
            count = wire.recv_into(target[begin : begin + asked])
        self.drained = count < asked and not wire.more
        self.received_bytes += count
        return count

    def deliver(self, count: int) -> None:
        """Count received bytes, and report a completed payload."""
        self._rest -= count
        if self._rest:
            if type(self._target) is Iovecs:
                self._target.rest = self._rest
            return
        # Keep no reference to memory that the handler is about to get back.
        landing = self._expected.popleft()
        self._target = None
        if self._expected:
            self._enter(self._expected[0])
        self._received(landing)

    def _enter(self, landing: Landing) -> None:
        self._rest = landing.length
        payload = None if landing.payload is None else simplest(landing.payload)
        if payload is None or isinstance(payload, memoryview):
            self._target = payload
        else:
            self._target = Iovecs(payload)

    def _look(self, wire: Wire) -> int:
        """Return 0 at the end of the stream; pause if bytes are available."""
        if not wire.look():
            return 0
        self._early()
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
