"""Lanes between event loops of one process: the reference of the contract.

A payload waits in its sender's memory under its descriptor until the receiver knows
where it goes, and the receiver copies it. All of that happens under one lock, so once a
endpoint has ended under it, nobody reads that endpoint's memory any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import Final

from kvwire.backend import Landing, Payload
from kvwire.backend.lane import Lane, LaneContext, LaneHandler
from kvwire.errors import (
    BackendUnavailable,
    ConnectionLost,
    MalformedFrame,
    UsageError,
)
from kvwire.limits import LANE_WAKEUP_BYTES
from kvwire.memory.copy import copy

_PREFIX: Final = b"inproc lane "
_NUMBER_BYTES: Final = 8

# One for all lanes: they are few, and copies within one process take turns anyway.
_lock = threading.RLock()
_numbers = count(1)
_endpoints: dict[int, InprocLane] = {}


class InprocLane(Lane):
    """Implements one endpoint of a lane.

    Args:
        context: With the setting ``break_after``, the lane breaks after this endpoint
            has received so many payloads: what a test of failover wants. ``span_bytes``
            is that of the lane.
    """

    intact = True

    def __init__(self, context: LaneContext) -> None:
        self._break_after = _number(context.settings, "break_after")
        self.span_bytes = _number(context.settings, "span_bytes")
        self._loop = asyncio.get_running_loop()
        self._number = next(_numbers)
        self._handler: LaneHandler | None = None
        self._peer: InprocLane | None = None
        self._descriptors = count(1)
        # Sent and not flushed; flushed and not taken by the peer.
        self._queue: dict[int, tuple[Payload, object]] = {}
        self._offers: dict[int, tuple[Payload, object]] = {}
        self._awaited: deque[tuple[int, Landing]] = deque()
        # Tokens of payloads that the peer has taken.
        self._taken: deque[object] = deque()
        self._received = 0
        self._received_bytes = 0
        self._full = False
        self._closing = False
        self._ended = False
        self._due = False
        with _lock:
            _endpoints[self._number] = self  # bounded: LANES_MAX

    @property
    def bootstrap(self) -> bytes:
        """Return the number of this endpoint."""
        return _PREFIX + self._number.to_bytes(_NUMBER_BYTES, "little")

    @property
    def description(self) -> str:
        return "a copy within the process"

    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        """Join the endpoint of the other side.

        Cancel safety: safe, it never waits.
        """
        number = int.from_bytes(bootstrap[len(_PREFIX) :], "little")
        sized = len(bootstrap) == len(_PREFIX) + _NUMBER_BYTES
        with _lock:
            peer = _endpoints.get(number)
            if self._ended:
                raise BackendUnavailable("the lane was aborted")
            if not sized or not bootstrap.startswith(_PREFIX) or peer is None:
                self.abort()
                raise BackendUnavailable("the peer is not in this process")
            self._peer, self._handler = peer, handler

    def send(self, payload: Payload, token: object) -> bytes:
        if self._ended or self._closing:
            return b""
        descriptor = next(self._descriptors)
        self._queue[descriptor] = (payload, token)  # bounded: LANE_PAYLOADS_MAX
        return descriptor.to_bytes(_NUMBER_BYTES, "little")

    def receive(self, descriptor: bytes, landing: Landing) -> None:
        if len(descriptor) != _NUMBER_BYTES:
            raise MalformedFrame(
                "KVW-LN-07", f"a descriptor of {len(descriptor)} bytes"
            )
        if not self._ended:
            # bounded: LANE_PAYLOADS_MAX
            self._awaited.append((int.from_bytes(descriptor, "little"), landing))

    def flush(self) -> None:
        with _lock:
            self._offers |= self._queue
            self._queue.clear()
            self._full = self._full or bool(self._offers)
            peer = self._peer
        self._wake()
        if peer is not None:
            peer._wake()  # noqa: SLF001 - the other endpoint

    def close(self) -> None:
        self._closing = True
        self.flush()

    def abort(self) -> None:
        self._end(None)

    @property
    def queued_bytes(self) -> int:
        with _lock:
            waiting = [*self._queue.values(), *self._offers.values()]
        return sum(payload.nbytes for payload, _ in waiting)

    @property
    def received_bytes(self) -> int:
        return self._received_bytes

    # --- the turns of this endpoint's loop --------------------------------------------

    def _wake(self) -> None:
        """Take a turn soon; called from any thread."""
        with _lock:
            if self._due or self._ended:
                return
            self._due = True
        try:
            self._loop.call_soon_threadsafe(self._turn)
        except RuntimeError:
            self._ended = True  # its loop was closed, and its memory with it

    def _turn(self) -> None:
        self._due = False
        if self._ended or self._handler is None or self._peer is None:
            return
        try:
            self._tell_sent(self._handler)
            self._take(self._peer, self._handler)
        except Exception as exc:  # noqa: BLE001 - a handler that raises loses its lane
            self._end(exc)
        self._maybe_end()

    def _maybe_end(self) -> None:
        """End if nothing is left to do, or nobody to do it with."""
        if self._peer is None:
            return
        busy = self._awaited or self._offers or self._queue or self._taken
        if self._closing and not busy:
            self._end(None)
        elif self._peer._ended:  # noqa: SLF001 - the other endpoint
            self._end(ConnectionLost("the other endpoint of the lane has ended"))

    def _tell_sent(self, handler: LaneHandler) -> None:
        while self._taken and not self._ended:
            handler.payload_sent(self, self._taken.popleft())
        if self._full and not self._ended and not self.queued_bytes:
            self._full = False
            handler.lane_writable(self)

    def _take(self, peer: InprocLane, handler: LaneHandler) -> None:
        """Copy what the peer offers to where it belongs, up to a budget."""
        moved_bytes = 0
        while self._awaited and not self._ended:
            descriptor, landing = self._awaited[0]
            if moved_bytes and moved_bytes + landing.length > LANE_WAKEUP_BYTES:
                self._wake()
                return
            with _lock:
                offer = peer._offers.pop(descriptor, None)
                if offer is None:
                    return
                payload, token = offer
                if landing.payload is not None:
                    copy(payload, landing.payload)
                peer._taken.append(token)
            peer._wake()
            self._awaited.popleft()
            moved_bytes += landing.length
            self._received += 1
            self._received_bytes += landing.length
            handler.payload_received(self, landing)
            if self._received == self._break_after:
                self._end(ConnectionLost(f"it breaks after {self._received} payloads"))

    def _end(self, error: Exception | None) -> None:
        with _lock:
            if self._ended:
                return
            self._ended = True
            _endpoints.pop(self._number, None)
            self._queue.clear()
            self._offers.clear()
            peer, handler = self._peer, self._handler
            self._handler = None
        self._awaited.clear()
        self._taken.clear()
        if peer is not None:
            peer._wake()  # noqa: SLF001 - the other endpoint
        if handler is not None:
            self._loop.call_soon(handler.lane_closed, self, error)
        self._peer = None


def _number(settings: Mapping[str, str], key: str) -> int:
    """Return the number in a setting; 0 if there is none."""
    text = settings.get(key, "0")
    if not text.isdecimal():
        raise UsageError(f"{key}={text!r}: a number is needed")
    return int(text)
