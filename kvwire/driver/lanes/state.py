"""The lanes of one connection, their states, and the transport that carries data.

Rule 1: every transition is decided in this file, and nothing else changes a state. Rule
2: the active transport is derived from the states, never set.

States of a lane, as this side sees its own endpoint:

* JOINING: ``join`` of its backend is running, or waits for the peer's bootstrap.
* JOINED: ``join`` has returned, so ``lane_closed`` will come. The peer is not ready.
* OPEN: both endpoints are ready; payload may be sent on it.
* ABANDONED: it has to end, but ``join`` has not returned, and may still return.
* CLOSING: it has to end, and may touch memory until ``lane_closed``.
* CLOSED: it touches no memory, and is forgotten.

Inputs:

* JOINED: ``join`` has returned.
* READY: both sides know that both endpoints have joined.
* CLOSE: the peer has closed its endpoint, or the connection ends.
* GIVE_UP: ``join`` has raised, or the lane is no longer wanted.
* GONE: ``lane_closed`` was called.

The core has other states (kvwire.proto.lanes), which decide which frames are allowed.
"""

from __future__ import annotations

import enum
from typing import Final

from kvwire.backend.lane import Lane
from kvwire.types import TransportReport

_OFFERED: Final = "offered by both sides"


class LaneState(enum.Enum):
    """The states of a lane."""

    JOINING = "joining"
    JOINED = "joined"
    OPEN = "open"
    ABANDONED = "abandoned"
    CLOSING = "closing"
    CLOSED = "closed"


class LaneInput(enum.Enum):
    """The inputs that change the state of a lane."""

    JOINED = "joined"
    READY = "ready"
    CLOSE = "close"
    GIVE_UP = "give up"
    GONE = "gone"


# A step that is not listed does not exist: requesting it is a bug of kvwire or of a
# backend.
LANE_TRANSITIONS: Final[dict[tuple[LaneState, LaneInput], LaneState]] = {
    (LaneState.JOINING, LaneInput.JOINED): LaneState.JOINED,
    (LaneState.JOINING, LaneInput.CLOSE): LaneState.ABANDONED,
    (LaneState.JOINING, LaneInput.GIVE_UP): LaneState.CLOSED,
    (LaneState.ABANDONED, LaneInput.JOINED): LaneState.CLOSING,
    (LaneState.ABANDONED, LaneInput.CLOSE): LaneState.ABANDONED,
    (LaneState.ABANDONED, LaneInput.GIVE_UP): LaneState.CLOSED,
    (LaneState.JOINED, LaneInput.READY): LaneState.OPEN,
    (LaneState.JOINED, LaneInput.CLOSE): LaneState.CLOSING,
    (LaneState.JOINED, LaneInput.GIVE_UP): LaneState.CLOSING,
    (LaneState.JOINED, LaneInput.GONE): LaneState.CLOSED,
    (LaneState.OPEN, LaneInput.CLOSE): LaneState.CLOSING,
    (LaneState.OPEN, LaneInput.GONE): LaneState.CLOSED,
    # It ended here while the frame LANE_READY was on its way.
    (LaneState.CLOSING, LaneInput.READY): LaneState.CLOSING,
    (LaneState.CLOSING, LaneInput.CLOSE): LaneState.CLOSING,
    (LaneState.CLOSING, LaneInput.GIVE_UP): LaneState.CLOSING,
    (LaneState.CLOSING, LaneInput.GONE): LaneState.CLOSED,
    # It ended between the return of ``join`` and the next step of its setup.
    (LaneState.CLOSED, LaneInput.GIVE_UP): LaneState.CLOSED,
}


class LaneEndpoint:
    """This side's endpoint of one lane; only :class:`LaneSet` changes its state.

    Attributes:
        reason: Why it was closed, or "".
    """

    __slots__ = ("backend", "lane", "number", "reason", "state")

    def __init__(self, number: int, backend: str, lane: Lane) -> None:
        self.number: int = number
        self.backend: str = backend
        self.lane: Lane = lane
        self.state: LaneState = LaneState.JOINING
        self.reason: str = ""


class LaneSet:
    """The lanes of one connection.

    Args:
        scheme: The transport of the control link.
        report: The server's verdicts, in the order in which they are tried.

    Attributes:
        possible: The transports that may carry data, in the order of the report.
        fallback: Whether the control link may carry payload while no lane is open.
        open: The lanes that may send, in the order in which they opened.
        failed: By transport name, why it could not be opened, or broke.
        initial_set_done: Whether the client has made its first choice. Lanes may still
            open.
        broken: The transport whose last open lane has broken, until one opens, or "".
    """

    def __init__(self, scheme: str, report: TransportReport) -> None:
        self.scheme = scheme
        self.verdicts = report
        self.possible: tuple[str, ...] = tuple(
            [c.name for c in report if c.possible or c.taken]
        )
        self.fallback: bool = scheme in self.possible
        self.open: list[LaneEndpoint] = []
        self.failed: dict[str, str] = {}  # bounded: BACKENDS_MAX
        self.initial_set_done: bool = False
        self._endpoints: dict[Lane, LaneEndpoint] = {}
        self.broken: str = ""
        # The transport that carried the data when the connection ended, and the reason.
        self._last: tuple[str, str] | None = None

    # --- the lanes --------------------------------------------------------------------

    def add(self, endpoint: LaneEndpoint) -> None:
        """Add an endpoint that is about to join."""
        self._endpoints[endpoint.lane] = endpoint  # bounded: LANES_MAX

    def of(self, lane: Lane) -> LaneEndpoint:
        """Return the endpoint of a backend's lane, which must not be closed yet."""
        return self._endpoints[lane]

    def find(self, number: int) -> LaneEndpoint | None:
        """Return the endpoint with this number, unless it is closed."""
        for endpoint in self._endpoints.values():
            if endpoint.number == number:
                return endpoint
        return None

    def knows(self, lane: Lane) -> bool:
        """Return whether a lane is one of this connection's and not closed."""
        return lane in self._endpoints

    @property
    def quiet(self) -> bool:
        """Whether no lane can touch any memory."""
        return not self._endpoints

    def advance(
        self, endpoint: LaneEndpoint, happened: LaneInput, reason: str = ""
    ) -> LaneState:
        """Take one step of the table; return the previous state."""
        before = endpoint.state
        after = endpoint.state = LANE_TRANSITIONS[before, happened]
        if before is after:
            return before
        if after is not LaneState.OPEN:
            endpoint.reason = endpoint.reason or reason
        if after is LaneState.CLOSED:
            del self._endpoints[endpoint.lane]
        if after is LaneState.OPEN:
            self.open.append(endpoint)  # bounded: LANES_MAX
            if self.broken == endpoint.backend:
                del self.failed[self.broken]
                self.broken = ""
        elif before is LaneState.OPEN:
            self.open.remove(endpoint)
            if not self.open and self._last is None:
                self.broken = endpoint.backend
                self.failed[self.broken] = endpoint.reason
        return before

    def end_initial_set(self) -> None:
        """Record that the client has made its first choice."""
        self.initial_set_done = True

    def end(self) -> list[LaneEndpoint]:
        """Close every lane at the connection's end; return the lanes still in use."""
        if self._last is None:
            self._last = self.transport, self.why
        for endpoint in self._endpoints.values():
            self.advance(endpoint, LaneInput.CLOSE, "the connection ended")
        return list(self._endpoints.values())

    # --- what carries the data --------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether the connection has ended."""
        return self._last is not None

    @property
    def shared(self) -> bool:
        """Whether the control link carries payload in addition to open lanes."""
        return bool(self.open) and self.open[0].backend == self.scheme

    @property
    def transport(self) -> str:
        """The name of the transport that carries the data; "" if none may."""
        if self._last is not None:
            return self._last[0]
        if self.open:
            return self.open[0].backend
        return (
            self.scheme if self.initial_set_done or self.broken else self.verdicts.taken
        )

    @property
    def why(self) -> str:
        """Why this transport carries the data."""
        if self._last is not None:
            return self._last[1]
        if self.open:
            shared = self.shared
            return _OFFERED if shared else self.open[0].lane.description
        if self.broken:
            return f"{self.broken} failed: {self.failed[self.broken]}"
        if self.initial_set_done:
            return _OFFERED
        return next((c.reason for c in self.verdicts if c.taken), "")
