"""Bytes in, payloads out: what a lane receives has no frames, only an order.

Payloads come in the order in which they were expected, one behind the other, straight
to where they belong. Bytes that nobody expects stay in the kernel: they are early, as
payload overtakes the control link that announces it, and a peer that sends more than
it announces fills a window and no memory of ours.
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

# What is dropped goes here, so many bytes a call.
_DROPPED_BYTES: Final = 64 * KIB


class PayloadReader:
    """Receives the payloads of one lane."""

    # A lane that is paused does not listen.
    paused = waits = False

    def __init__(
        self, received: Callable[[Landing], None], early: Callable[[], None]
    ) -> None:
        self._received = received
        self._early = early
        # The first is under way: so many bytes of it are to come, and go here.
        self._expected: deque[Landing] = deque()
        self._rest = 0
        self._target: memoryview | Iovecs | None = None
        self.received_bytes = 0
        self.drained = False
        self.stopped = False

    @property
    def position(self) -> str:
        """Return how much of what is expected has come; "" if nothing is."""
        if not self._expected:
            return ""
        length = self._expected[0].length
        more = len(self._expected) - 1
        return f"{length - self._rest} of {length} payload bytes, {more} more expected"

    def expect(self, landing: Landing) -> None:
        """Receive one more payload."""
        assert landing.length, "a payload has at least one byte"
        if landing.payload is not None:
            check_destination(landing.payload, landing.length)
        self._expected.append(landing)
        if len(self._expected) == 1:
            self._enter(landing)

    def stop(self) -> None:
        """Deliver nothing more, and forget the memory of every payload."""
        self.stopped = True
        self._expected.clear()
        self._target = None

    def receive(self, wire: Wire) -> int:
        """Receive once, into the payload that is next."""
        if not self._expected:
            return self._look(wire)
        target, rest = self._target, self._rest
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
        """Count what has come, and say so if that completes a payload."""
        self._rest -= count
        if self._rest:
            if type(self._target) is Iovecs:
                self._target.rest = self._rest
            return
        # No reference may be left to memory that the handler now has back.
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
        """Look for the end of the stream where nothing is expected; 0 at it."""
        if not wire.look():
            return 0
        self._early()
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
