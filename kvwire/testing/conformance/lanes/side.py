"""One side of a lane under test: it sends, records what it is told, and judges it.

Whatever a check is about, every callback is held against the contract of
:mod:`kvwire.lane`: on the loop's thread, not from inside a call other than ``flush``,
for a payload that is under way, and nothing after ``lane_closed``.

A side plays the core as well: it hands each ticket to the side across, in order, as a
control link would, and names the memory that its payload lands in.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvwire.backend import Landing
from kvwire.lane import Lane, LaneHandler
from kvwire.limits import TICKET_BYTES_MAX
from kvwire.testing.conformance.content import Cut, Memory, pattern
from kvwire.testing.conformance.side import Token, Verdicts


@dataclass(frozen=True, slots=True)
class Parcel:
    """What the control link says of one payload."""

    number: int
    length: int
    ticket: bytes


class LaneLanding(Landing):
    """A landing that knows its payload's number."""

    __slots__ = ("memory", "number")

    def __init__(self, parcel: Parcel, memory: Memory | None) -> None:
        super().__init__(parcel.length, memory.payload if memory else None)
        self.number = parcel.number
        self.memory = memory


class LaneSide(LaneHandler):
    """One side of a lane, its handler and its caller.

    Args:
        name: For messages.
        lane: Not yet joined.
        verdicts: Where broken promises go.

    Attributes:
        joined: ``join`` has returned.
        arrived: Numbers of the payloads that arrived as they were sent, in order.
        sent: Tokens given back, in order.
        writable: How often the lane said that it is writable.
        closed: What ``lane_closed`` was told; one entry in the end.
        inbox: What the side across has sent and this side has not received.
        holding: Whether parcels wait in the inbox until :meth:`take`.
        trusting: Whether what arrives must be what an honest peer would have sent.
        land: Chooses the memory for a payload; None drops it.
        on_received: Called within ``payload_received``.
        on_sent: Called within ``payload_sent``.
        on_writable: Called within ``lane_writable``.
        on_closed: Called within ``lane_closed``.
        across: The other side; set by the rig.
    """

    across: LaneSide

    def __init__(self, name: str, lane: Lane, verdicts: Verdicts) -> None:
        self.name = name
        self.lane = lane
        self.joined = False
        self.arrived: list[int] = []
        self.sent: list[Token] = []
        self.writable = 0
        self.closed: list[Exception | None] = []
        self.inbox: deque[Parcel] = deque()
        self.holding = False
        self.trusting = True
        self.land: Callable[[Parcel], Memory | None] = _new_view
        self.on_received: Callable[[LaneLanding], None] = _nothing
        self.on_sent: Callable[[Token], None] = _nothing
        self.on_writable: Callable[[], None] = _nothing
        self.on_closed: Callable[[], None] = _nothing
        self._verdicts = verdicts
        self._thread = threading.get_ident()
        self._next_number = 0
        self._lent: list[Token] = []
        self._landings: list[LaneLanding] = []
        self._aborted = False

    # --- what a check does ------------------------------------------------------------

    async def join(self, bootstrap: bytes) -> None:
        """Join the lane across, of which these bytes are the bootstrap."""
        await self.lane.join(bootstrap, self)
        self.joined = True

    def queue(
        self,
        length: int,
        cut: Cut | None = None,
        *,
        memory: Memory | None = None,
        number: int | None = None,
    ) -> Token:
        """Send ``length`` pseudo-random bytes, without a flush on either side.

        Args:
            length: Of the payload.
            cut: How its memory is cut.
            memory: Use this and do not fill it.
            number: Of the payload; by default one more than of the one before.
        """
        number = self._next_number if number is None else number
        self._next_number = number + 1
        if memory is None:
            memory = Memory(length, cut)
            memory.fill(pattern(number, length))
        token = Token(number, memory)
        ended = bool(self.closed)
        if not ended and not self._aborted:
            self._lent.append(token)
        with self._calling("send"):
            ticket = self.lane.send(memory.payload, token)
        if len(ticket) > TICKET_BYTES_MAX:
            self.wrong(f"send returned a ticket of {len(ticket)} bytes")
        if ended and ticket:
            self.wrong("send returned a ticket after lane_closed")
        self.across.inbox.append(Parcel(number, length, ticket))
        return token

    def send(self, length: int, cut: Cut | None = None) -> Token:
        """Send a payload, flush, and let the side across receive what it has."""
        token = self.queue(length, cut)
        self.flush()
        if not self.across.holding:
            self.across.take()
        return token

    def take(self, count: int | None = None) -> None:
        """Receive the first ``count`` payloads of the inbox, or all, and flush."""
        for _ in range(len(self.inbox) if count is None else count):
            self.receive(self.inbox.popleft())
        self.flush()

    def receive(self, parcel: Parcel) -> None:
        """Queue one arrival, as the control link said it.

        Raises:
            ProtocolError: The lane refuses the ticket.
        """
        if self.closed or self._aborted:
            landing = LaneLanding(parcel, None)
        else:
            landing = LaneLanding(parcel, self.land(parcel))
            self._landings.append(landing)
        try:
            with self._calling("receive"):
                self.lane.receive(parcel.ticket, landing)
        except Exception:
            if landing in self._landings:
                self._landings.remove(landing)
            raise

    def flush(self) -> None:
        """Flush the lane."""
        with self._calling("flush"):
            self.lane.flush()

    def close(self) -> None:
        """Close the lane."""
        with self._calling("close"):
            self.lane.close()

    def abort(self) -> None:
        """Abort the lane."""
        self._aborted = True
        with self._calling("abort"):
            self.lane.abort()

    def forget(self) -> None:
        """Let go of everything lent that will not be given back."""
        self._lent.clear()
        self._landings.clear()
        self.inbox.clear()

    @property
    def lent(self) -> int:
        """Tokens that have not been given back."""
        return len(self._lent)

    @property
    def expected(self) -> int:
        """Payloads that were received and have not arrived."""
        return len(self._landings)

    def wrong(self, text: str) -> None:
        """Note a promise that this side saw broken."""
        self._verdicts.add(f"{self.name}: {text}")

    # --- what the lane does -----------------------------------------------------------

    def payload_sent(self, lane: Lane, token: object) -> None:
        """See :class:`~kvwire.lane.LaneHandler`."""
        with self._told("payload_sent", lane):
            index = next((i for i, t in enumerate(self._lent) if t is token), None)
            if index is None or not isinstance(token, Token):
                self.wrong(f"payload_sent for {token!r}, which is not lent (any more)")
                return
            del self._lent[index]
            self.sent.append(token)
            self.on_sent(token)
            token.memory = None

    def payload_received(self, lane: Lane, landing: Landing) -> None:
        """See :class:`~kvwire.lane.LaneHandler`."""
        with self._told("payload_received", lane):
            if not isinstance(landing, LaneLanding) or landing not in self._landings:
                self.wrong(f"payload_received for {landing!r}, which is not awaited")
                return
            self._landings.remove(landing)
            if self._aborted:
                self.wrong("payload_received after abort")
            self._judge(landing)
            self.arrived.append(landing.number)
            self.on_received(landing)

    def lane_writable(self, lane: Lane) -> None:
        """See :class:`~kvwire.lane.LaneHandler`."""
        with self._told("lane_writable", lane):
            self.writable += 1
            if lane.queued_bytes:
                self.wrong(f"lane_writable with {lane.queued_bytes} bytes queued")
            self.on_writable()

    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        """See :class:`~kvwire.lane.LaneHandler`."""
        with self._told("lane_closed", lane):
            self.closed.append(error)
            self.on_closed()

    # --- judging ----------------------------------------------------------------------

    @contextmanager
    def _calling(self, what: str) -> Iterator[None]:
        self._verdicts.inside.append((self, what))
        try:
            yield
        finally:
            self._verdicts.inside.pop()

    @contextmanager
    def _told(self, what: str, lane: Lane) -> Iterator[None]:
        inside = self._verdicts.inside
        if inside and inside[-1] != (self, "flush"):
            self.wrong(f"{what} was called from inside {inside[-1][1]}")
        if threading.get_ident() != self._thread:
            self.wrong(f"{what} was called on another thread than the loop's")
        if lane is not self.lane:
            self.wrong(f"{what} was called with another lane")
        if not self.joined:
            self.wrong(f"{what} was called before join returned")
        if self.closed:
            self.wrong(f"{what} was called after lane_closed")
        inside.append((self, what))
        try:
            yield
        finally:
            inside.pop()
            self._verdicts.changed()

    def _judge(self, landing: LaneLanding) -> None:
        memory = landing.memory
        if memory is None:
            return
        expected = pattern(landing.number, memory.nbytes)
        place = memory.differs_at(expected) if self.trusting else None
        if place is not None:
            self.wrong(
                f"payload {landing.number} of {memory.nbytes} bytes is wrong at "
                f"payload_received, first at byte {place}"
            )
        if not memory.gaps_are_whole():
            self.wrong(
                f"payload {landing.number}: memory beside its destination was written"
            )


def _new_view(parcel: Parcel) -> Memory | None:
    return Memory(parcel.length)


def _nothing(*_: object) -> None:
    return
