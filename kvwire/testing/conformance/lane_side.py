"""One side of a lane under test: it sends, records what it is told, and judges it.

Whatever a check is about, every callback is held against the contract of
:mod:`kvwire.backend.lane`: on the loop's thread, not from inside a call other than
``flush``, for a payload that is under way, and nothing after ``lane_closed``.

A side plays the core as well: it hands each descriptor to the side across, in order, as
a control link would, and names the memory that its payload lands in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvwire.backend import Landing
from kvwire.backend.lane import Lane, LaneHandler
from kvwire.limits import DESCRIPTOR_BYTES_MAX
from kvwire.testing.conformance.content import Cut, Memory, pattern
from kvwire.testing.conformance.witness import Token, Verdicts, Witness, nothing


@dataclass(frozen=True, slots=True)
class Parcel:
    """What the control link says of one payload."""

    number: int
    length: int
    descriptor: bytes


class LaneLanding(Landing):
    """A landing that knows its payload's number."""

    __slots__ = ("memory", "number")

    def __init__(self, parcel: Parcel, memory: Memory | None) -> None:
        super().__init__(parcel.length, memory.payload if memory else None)
        self.number: int = parcel.number
        self.memory: Memory | None = memory


class LaneSide(Witness, LaneHandler):
    """One side of a lane, its handler and its caller.

    Args:
        name: For messages.
        lane: Not yet joined.
        verdicts: Where broken promises go.

    Attributes:
        lane: The lane.
        inbox: What the side across has sent and this side has not received.
        holding: Whether parcels wait in the inbox until :meth:`take`.
        trusting: Whether what arrives must be what an honest peer would have sent.
        land: Chooses the memory for a payload; None drops it.
        on_arrival: Called within ``payload_received``.
        across: The other side; set by the rig.
    """

    kind = "lane"
    begins_with = "join returned"
    within_flush: ClassVar[frozenset[str]] = frozenset(
        {"payload_sent", "payload_received", "lane_writable", "lane_closed"}
    )

    across: LaneSide

    def __init__(self, name: str, lane: Lane, verdicts: Verdicts) -> None:
        super().__init__(name, lane, verdicts)
        self.lane = lane
        self.inbox: deque[Parcel] = deque()
        self.holding: bool = False
        self.trusting = True
        self.land: Callable[[Parcel], Memory | None] = _new_view
        self.on_arrival: Callable[[LaneLanding], None] = nothing
        self._landings: list[LaneLanding] = []

    # --- what a check does ------------------------------------------------------------

    async def join(self, bootstrap: bytes) -> None:
        """Join the lane across, of which these bytes are the bootstrap."""
        await self.lane.join(bootstrap, self)
        self.begun = True

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
        number = self._number(number)
        if memory is None:
            memory = Memory(length, cut)
            memory.fill(pattern(number, length))
        token = Token(number, memory)
        ended = bool(self.closed)
        if not ended and not self._aborted:
            self._lent.append(token)
        with self._calling("send"):
            descriptor = self.lane.send(memory.payload, token)
        if len(descriptor) > DESCRIPTOR_BYTES_MAX:
            self.wrong(f"send returned a descriptor of {len(descriptor)} bytes")
        if ended and descriptor:
            self.wrong("send returned a descriptor after lane_closed")
        self.across.inbox.append(Parcel(number, length, descriptor))
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

    def release(self) -> None:
        """Receive what has waited; see :meth:`LaneRig.held_pair`."""
        self.holding = False
        self.take()

    def receive(self, parcel: Parcel) -> None:
        """Queue one arrival, as the control link said it.

        Raises:
            ProtocolError: The lane refuses the descriptor.
        """
        if self.closed or self._aborted:
            landing = LaneLanding(parcel, None)
        else:
            landing = LaneLanding(parcel, self.land(parcel))
            self._landings.append(landing)
        try:
            with self._calling("receive"):
                self.lane.receive(parcel.descriptor, landing)
        except Exception:
            if landing in self._landings:
                self._landings.remove(landing)
            raise

    def forget(self) -> None:
        """Let go of everything lent that will not be given back."""
        super().forget()
        self._landings.clear()
        self.inbox.clear()

    @property
    def expected(self) -> int:
        """Payloads that were received and have not arrived."""
        return len(self._landings)

    # --- what the lane does -----------------------------------------------------------

    def payload_sent(self, lane: Lane, token: object) -> None:
        """See :class:`~kvwire.backend.lane.LaneHandler`."""
        with self._told("payload_sent", lane):
            self._given_back("payload_sent", token)

    def payload_received(self, lane: Lane, landing: Landing) -> None:
        """See :class:`~kvwire.backend.lane.LaneHandler`."""
        with self._told("payload_received", lane):
            if not isinstance(landing, LaneLanding) or landing not in self._landings:
                self.wrong(f"payload_received for {landing!r}, which is not awaited")
                return
            self._landings.remove(landing)
            if self._aborted:
                self.wrong("payload_received after abort")
            if landing.memory is not None:
                self._judge(
                    "payload_received",
                    landing.number,
                    landing.memory,
                    bytes_too=self.trusting,
                )
            self.arrived.append(landing.number)
            self.on_arrival(landing)

    def lane_writable(self, lane: Lane) -> None:
        """See :class:`~kvwire.backend.lane.LaneHandler`."""
        with self._told("lane_writable", lane):
            self.writable += 1
            if lane.queued_bytes:
                self.wrong(f"lane_writable with {lane.queued_bytes} bytes queued")
            self.on_writable()

    def lane_closed(self, lane: Lane, error: Exception | None) -> None:
        """See :class:`~kvwire.backend.lane.LaneHandler`."""
        with self._told("lane_closed", lane):
            self.closed.append(error)
            self.on_closed()


def _new_view(parcel: Parcel) -> Memory | None:
    return Memory(parcel.length)
