"""What carries one connection's data, why, and what is said when that changes.

Nothing is said at once. When a peer dies, or aborts, its lanes often end a moment
before the control link does, and that end is told by the connection's own error: a
warning about each lane would only hide it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvwire.backend.selection import protection, tried
from kvwire.driver.counters import Counters
from kvwire.driver.lanes.scheduler import LaneEndpoint, LaneScheduler
from kvwire.types import PeerInfo, TransportReport, TrustMode

logger = logging.getLogger("kvwire")

# Between the end of a lane and that of its control link, when a peer dies, there are a
# few turns of the loop; a warning that comes this much later is not missed.
WORD_S: Final = 0.25
# Why the transport of the control link carries data.
_OFFERED: Final = "offered by both sides"


class ActiveTransport:
    """The transport that carries a connection's data.

    Args:
        lanes: Of the connection.
        scheme: The transport of its control link.
        report: The server's verdicts.
        peer: Who is at the other end, for the log.
        counters: Of the communicator.

    Attributes:
        taken: The transport's name.
        report: Every transport considered, and why it was taken or not.
        failed: Why a transport did not come up, or broke, by name.
    """

    def __init__(
        self,
        lanes: LaneScheduler,
        *,
        scheme: str,
        report: TransportReport,
        peer: PeerInfo,
        counters: Counters,
    ) -> None:
        self.taken = report.taken
        self.failed: dict[str, str] = {}  # bounded: BACKENDS_MAX
        self._lanes = lanes
        self._scheme = scheme
        self._peer = peer
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._words: list[asyncio.TimerHandle] = []
        reason = next((c.reason for c in report if c.taken), "")
        self.report = tried(report, report.taken, self._guarded(self.taken, reason), {})

    @property
    def untold(self) -> int:
        """How many lines for the log still wait for their moment."""
        now = self._loop.time()
        return sum(word.when() > now for word in self._words)

    # --- what carries it --------------------------------------------------------------

    def take_link(self) -> None:
        """The control link carries it, with lanes of its own transport or alone."""
        self._take(self._scheme, _OFFERED)

    def take_lane(self, half: LaneEndpoint) -> None:
        """Lanes of another transport carry it; this is one of them."""
        self._take(half.backend, half.lane.description)

    def lane_broke(self, name: str, reason: str) -> None:
        """A lane that was up has broken; what is left carries the data."""
        if self._lanes.up:
            self.say(f"a lane of {name} broke: {reason}")
            return
        self.say(f"{name} failed, and the control link carries the data now: {reason}")
        self.failed[name] = reason
        self._take(self._scheme, f"{name} failed: {reason}")

    def lane_came_back(self, half: LaneEndpoint) -> None:
        """A lane has come up in the place of one that had broken."""
        name = half.backend
        self.failed.pop(name, None)
        if name == self._scheme:
            self._carried_by(name, _OFFERED)
        elif self._lanes.up == [half]:
            self._carried_by(name, half.lane.description)
            self.say(f"{name} is back and carries the data again", logging.INFO)
            return
        self.say(f"a lane of {name} is back", logging.INFO)

    def _take(self, name: str, why: str) -> None:
        if name != self.taken:
            self._counters.transport_fallbacks += 1
        self._carried_by(name, why)

    def _carried_by(self, name: str, why: str) -> None:
        self.taken = name
        self.report = tried(self.report, name, self._guarded(name, why), self.failed)
        self._lanes.shared = name == self._scheme

    def _guarded(self, name: str, why: str) -> str:
        """Why a transport carries the data and, in ``mtls`` mode, who can read it."""
        if self._peer.trust is not TrustMode.MTLS:
            return why
        return f"{why}; {protection(name) or 'NOT ENCRYPTED'}"

    # --- the log ----------------------------------------------------------------------

    def say(self, text: str, level: int = logging.WARNING) -> None:
        """Log in a moment, unless the whole connection has ended by then."""
        now = self._loop.time()
        self._words = [word for word in self._words if word.when() > now]
        self._words.append(  # bounded: LANES_MAX
            self._loop.call_later(
                WORD_S, logger.log, level, "peer %s: %s", self._peer, text
            )
        )

    def end(self) -> None:
        """The connection ends: what was to be said about its lanes is not said."""
        for word in self._words:
            word.cancel()
        self._words.clear()
