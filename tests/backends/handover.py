"""The reference lane: payload changes hands within one process, copied on arrival.

It exists to show that the conformance kit of lanes passes what is right and finds what
is wrong: a planted bug changes one of its methods.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import ClassVar, NoReturn

from kvwire.backend import (
    Availability,
    Backend,
    Capabilities,
    Landing,
    Link,
    Listener,
    Payload,
)
from kvwire.errors import BackendUnavailable, ConnectionLost, ProtocolError
from kvwire.lane import Lane, LaneContext, LaneHandler
from kvwire.limits import WAKEUP_BYTES
from kvwire.memory.copy import copy
from kvwire.types import Address

_PREFIX = b"handover"
_numbers = count(1)


class HandoverBackend(Backend):
    """Lanes within one process."""

    scheme: ClassVar[str] = "handover"
    capabilities: ClassVar[Capabilities] = Capabilities(
        links=False, lanes=True, same_process=True
    )

    @classmethod
    def availability(cls) -> Availability:
        """Always."""
        return Availability(available=True, reason="a reference for tests")

    async def listen(
        self, address: Address, accept: Callable[[Link], None]
    ) -> Listener:
        """Lanes only."""
        _no_links()

    async def connect(self, address: Address) -> Link:
        """Lanes only."""
        _no_links()

    def open_lane(self, context: LaneContext) -> Lane:
        """Make one; there is nothing that could fail."""
        return HandoverLane()


def _no_links() -> NoReturn:
    raise BackendUnavailable("handover has lanes only")


class HandoverLane(Lane):
    """One side. ``_offers`` is what the side across may take."""

    _open: ClassVar[dict[int, HandoverLane]] = {}

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._open[self.number] = self
        self._loop = asyncio.get_running_loop()
        self._handler: LaneHandler | None = None
        self._peer: HandoverLane | None = None
        self._tickets = count(1)
        self._queue: dict[int, tuple[Payload, object]] = {}
        self._offers: dict[int, tuple[Payload, object]] = {}
        self._taken = 0
        self._awaited: deque[tuple[int, Landing]] = deque()
        self._closing = False
        self._ended = False
        self._scheduled = False
        self._kept = False
        self._received_bytes = 0

    @property
    def bootstrap(self) -> bytes:
        """The lane's number."""
        return _PREFIX + self.number.to_bytes(8, "little")

    @property
    def description(self) -> str:
        """What moves the bytes."""
        return "a copy within the process"

    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        """Find the lane across by its number."""
        peer = self._open.get(int.from_bytes(bootstrap[8:], "little"))
        if bootstrap[:8] != _PREFIX or len(bootstrap) != 16 or peer is None:
            self.abort()
            raise BackendUnavailable(f"no lane is called {bootstrap[:16]!r}")
        self._peer, self._handler = peer, handler

    def send(self, payload: Payload, token: object) -> bytes:
        """Queue it under the next number."""
        if self._ended or self._closing:
            return b""
        ticket = next(self._tickets)
        self._queue[ticket] = (payload, token)
        return ticket.to_bytes(8, "little")

    def receive(self, ticket: bytes, landing: Landing) -> None:
        """Queue the arrival of a number."""
        if self._ended:
            return
        if len(ticket) != 8:
            raise ProtocolError("KVW-XX-00", f"a ticket of {len(ticket)} bytes")
        self._awaited.append((int.from_bytes(ticket, "little"), landing))

    def flush(self) -> None:
        """Offer what is queued, and look for what is awaited."""
        self._offers |= self._queue
        self._queue.clear()
        self._kept = self._kept or bool(self._offers)
        self._wake()
        if self._peer is not None:
            self._peer._wake()

    def close(self) -> None:
        """End once nothing is under way."""
        self._closing = True
        self.flush()

    def abort(self) -> None:
        """End now."""
        if not self._ended:
            self._end(None)

    @property
    def queued_bytes(self) -> int:
        """Offered bytes that have not been taken count too."""
        waiting = [*self._queue.values(), *self._offers.values()]
        return sum(payload.nbytes for payload, _ in waiting)

    @property
    def received_bytes(self) -> int:
        """Dropped ones too."""
        return self._received_bytes

    # --- the loop's turns -------------------------------------------------------------

    def _wake(self) -> None:
        if not self._scheduled and not self._ended:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        peer, handler = self._peer, self._handler
        if self._ended or handler is None or peer is None:
            return
        try:
            self._take(peer, handler)
        except Exception as exc:  # noqa: BLE001 - a handler that raises loses its lane
            self._end(exc)
        under_way = self._awaited or self._offers or self._queue or self._taken
        if self._closing and not under_way:
            self._end(None)
        elif under_way and peer._ended and not self._taken:
            self._end(ConnectionLost("the lane across has ended"))

    def _take(self, peer: HandoverLane, handler: LaneHandler) -> None:
        budget = WAKEUP_BYTES
        while self._awaited and not self._ended:
            ticket, landing = self._awaited[0]
            if ticket not in peer._offers:
                return
            if budget < landing.length and budget < WAKEUP_BYTES:
                self._wake()
                return
            payload, token = peer._offers.pop(ticket)
            self._awaited.popleft()
            if landing.payload is not None:
                copy(payload, landing.payload)
            budget -= landing.length
            self._received_bytes += landing.length
            peer._taken += 1
            self._loop.call_soon(peer._sent, token)
            handler.payload_received(self, landing)

    def _sent(self, token: object) -> None:
        self._taken -= 1
        if self._ended or self._handler is None:
            return
        try:
            self._handler.payload_sent(self, token)
            if self._kept and not self.queued_bytes and not self._ended:
                self._kept = False
                self._handler.lane_writable(self)
        except Exception as exc:  # noqa: BLE001 - a handler that raises loses its lane
            self._end(exc)
        self._wake()

    def _end(self, error: Exception | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._open.pop(self.number, None)
        for waiting in (self._queue, self._offers, self._awaited):
            waiting.clear()
        peer, handler = self._peer, self._handler
        self._peer = self._handler = None
        if peer is not None:
            peer._wake()
        if handler is not None:
            self._loop.call_soon(handler.lane_closed, self, error)
