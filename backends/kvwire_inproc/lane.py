"""Lanes between event loops of one process: the reference of the contract.

The two halves find each other by the secret of their lane. A payload waits in its
sender's memory until the receiver knows where it goes and copies it, under the lock of
the pair: so once a half has ended under that lock, nobody reads its memory any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvwire.backend import Landing, Payload
from kvwire.errors import BackendUnavailable, ConnectionLost, UsageError
from kvwire.lane import Lane, LaneContext, LaneHandler
from kvwire.limits import LANES_MAX
from kvwire.memory.copy import copy

# Halves that wait for the other one: as many as a test may have open at once.
_WAITING_MAX = 64 * LANES_MAX


@dataclass(frozen=True, slots=True)
class _Sent:
    """A payload in its sender's memory."""

    payload: Payload
    token: object


class InprocLane(Lane):
    """One half of a lane.

    Args:
        context: With the setting ``break_after``, the lane breaks after this half has
            received so many payloads: what a test of failover wants.
    """

    description = "memory copy"

    def __init__(self, context: LaneContext) -> None:
        self._secret = context.secret
        self._loop = asyncio.get_running_loop()
        self._break_after = _count(context.settings.get("break_after"))
        self._lock = threading.RLock()
        self._peer: InprocLane | None = None
        self._handler: LaneHandler | None = None
        self._outgoing: deque[_Sent] = deque()
        self._landings: deque[Landing] = deque()
        self._received = 0
        self._received_bytes = 0
        self._closing = False
        self._ended = False
        _halves.leave(self)

    @property
    def bootstrap(self) -> bytes:
        """See Lane: nothing, since the secret is enough."""
        return b""

    @property
    def secret(self) -> bytes:
        """What the two halves of a lane have in common."""
        return self._secret

    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        """See Lane.

        Cancel safety: safe, it never waits.
        """
        peer = _halves.find(self)
        if peer is None or self._ended:
            self.abort()
            raise BackendUnavailable("the peer is not in this process")
        self._handler = handler
        if peer._handler is None:  # noqa: SLF001 - the other half of this lane
            self._peer = peer
            return
        self._lock = peer._lock  # noqa: SLF001
        with self._lock:
            self._peer, peer._peer = peer, self  # noqa: SLF001

    def send(self, payload: Payload, token: object) -> bytes:
        """See Lane."""
        if not self._ended:
            with self._lock:
                # bounded: LANE_PAYLOADS_MAX
                self._outgoing.append(_Sent(payload, token))
        return b""

    def receive(self, ticket: bytes, landing: Landing) -> None:
        """See Lane."""
        self._landings.append(landing)  # bounded: LANE_PAYLOADS_MAX

    def flush(self) -> None:
        """See Lane."""
        if self._handler is None or self._ended:
            return
        self._take()
        self._wake_peer()

    def close(self) -> None:
        """See Lane."""
        self._closing = True
        self._soon(self._finish)

    def abort(self) -> None:
        """See Lane."""
        _halves.forget(self)
        self._soon(lambda: self._end(None))

    @property
    def queued_bytes(self) -> int:
        """See Lane: what is queued here never waits for a transport."""
        return 0

    @property
    def received_bytes(self) -> int:
        """See Lane."""
        return self._received_bytes

    def _take(self) -> None:
        """Copy what has been sent to where it belongs."""
        peer, handler = self._peer, self._handler
        assert handler is not None
        while peer is not None and self._landings and not self._ended:
            with self._lock:
                if not peer._outgoing:  # noqa: SLF001 - the other half of this lane
                    return
                sent = peer._outgoing.popleft()  # noqa: SLF001
                landing = self._landings.popleft()
                if landing.payload is not None:
                    copy(sent.payload, landing.payload)
            peer._soon(lambda token=sent.token: peer._sent(token))  # type: ignore[misc]  # noqa: SLF001
            self._received += 1
            self._received_bytes += landing.length
            handler.payload_received(self, landing)
            if self._received == self._break_after:
                self._end(ConnectionLost(f"it breaks after {self._received} payloads"))

    def _sent(self, token: object) -> None:
        if not self._ended:
            assert self._handler is not None
            self._handler.payload_sent(self, token)

    def _finish(self) -> None:
        if self._closing and not self._outgoing:
            self._end(None)

    def _wake_peer(self) -> None:
        peer = self._peer
        if peer is not None:
            peer._soon(peer.flush_if_due)  # noqa: SLF001

    def flush_if_due(self) -> None:
        """Take what the other half has sent meanwhile."""
        if self._handler is not None and not self._ended and self._landings:
            self._take()

    def _end(self, error: Exception | None) -> None:
        if self._ended:
            return
        with self._lock:
            self._ended = True
            self._outgoing.clear()
        self._landings.clear()
        peer, self._peer = self._peer, None
        if peer is not None:
            lost = ConnectionLost("the other half of the lane has ended")
            peer._soon(lambda: peer._end(lost))  # noqa: SLF001
        if self._handler is not None:
            self._handler.lane_closed(self, error)

    def _soon(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            self._ended = True  # its loop was closed, and its memory with it


class _Halves:
    """Halves that wait for the other one; loops of several threads ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[bytes, list[InprocLane]] = {}

    def leave(self, half: InprocLane) -> None:
        with self._lock:
            while len(self._waiting) >= _WAITING_MAX:
                self._waiting.pop(next(iter(self._waiting)))
            # bounded: LANES_MAX
            self._waiting.setdefault(half.secret, []).append(half)

    def find(self, half: InprocLane) -> InprocLane | None:
        with self._lock:
            others = [h for h in self._waiting.get(half.secret, ()) if h is not half]
            return others[0] if others else None

    def forget(self, half: InprocLane) -> None:
        with self._lock:
            halves = self._waiting.get(half.secret, [])
            if half in halves:
                halves.remove(half)
            if not halves:
                self._waiting.pop(half.secret, None)


def _count(text: str | None) -> int:
    """The number in a setting; 0 if there is none."""
    if text is None:
        return 0
    if not text.isdecimal():
        raise UsageError(f"break_after={text!r}: a number of payloads is needed")
    return int(text)


_halves = _Halves()
