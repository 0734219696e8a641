"""The transport that carries one connection's data, and a log of its changes.

Each line of the log waits a moment. When a peer dies or aborts, its lanes often end a
little before the control link does, and the connection's own error reports that; a
warning about each lane would only hide it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvwire.backend.selection import protection, with_result
from kvwire.driver.counters import Counters
from kvwire.driver.lanes.state import LaneEndpoint, LaneSet
from kvwire.types import PeerInfo, TransportReport, TrustMode

logger: logging.Logger = logging.getLogger("kvwire.lanes")

# When a peer dies, its lanes and its control link end within a few turns of the loop; a
# warning that comes this much later is soon enough.
LOG_DELAY_S: Final = 0.25


class ActiveTransport:
    """Derives the transport that carries a connection's data from its lanes."""

    def __init__(self, lanes: LaneSet, peer: PeerInfo, counters: Counters) -> None:
        self._lanes = lanes
        self._peer = peer
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._pending: list[asyncio.TimerHandle] = []

    @property
    def name(self) -> str:
        """The transport's name."""
        return self._lanes.transport

    @property
    def report(self) -> TransportReport:
        """Every considered transport, and why it does or does not carry the data.

        In ``mtls`` mode it also shows whether others can read the data.
        """
        lanes = self._lanes
        why = self._lanes.why
        if self._peer.trust is TrustMode.MTLS:
            why = f"{why}; {protection(self.name) or 'NOT ENCRYPTED'}"
        return with_result(lanes.verdicts, self.name, why, lanes.failed)

    def initial_set_done(self) -> None:
        """Count a fallback if the first chosen transport is not the preferred one."""
        if self.name != self._lanes.verdicts.taken and not self._lanes.broken:
            self._counters.transport_fallbacks += 1

    def lane_broke(self, endpoint: LaneEndpoint) -> None:
        """Count and log a broken lane, unless the whole connection ends with it."""
        name = endpoint.backend
        reason = endpoint.reason
        if self._lanes.open:
            self.log(f"a lane of {name} broke: {reason}", lost=1)
            return
        self.log(
            f"{name} failed, and the control link carries the data now: {reason}",
            lost=1,
            fell_back=name != self._lanes.scheme,
        )

    def lane_came_back(self, endpoint: LaneEndpoint) -> None:
        """Count and log a lane that has replaced a broken one."""
        name = endpoint.backend
        self._counters.lanes_restored += 1
        if self._lanes.open == [endpoint] and name != self._lanes.scheme:
            self.log(f"{name} is back and carries the data again", logging.INFO)
        else:
            self.log(f"a lane of {name} is back", logging.INFO)

    # --- the log ----------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """The number of delayed log lines."""
        now = self._loop.time()
        return sum(line.when() > now for line in self._pending)

    def log(
        self,
        text: str,
        level: int = logging.WARNING,
        *,
        lost: int = 0,
        fell_back: bool = False,
    ) -> None:
        """Log and count after a short delay, unless the connection has ended by then.

        A peer that was killed is a lost connection, and no failed transport.
        """

        def note() -> None:
            self._counters.lanes_failed += lost
            self._counters.transport_fallbacks += fell_back
            logger.log(level, "peer %s: %s", self._peer, text)

        now = self._loop.time()
        self._pending = [line for line in self._pending if line.when() > now]
        # bounded: LANES_MAX
        self._pending.append(self._loop.call_later(LOG_DELAY_S, note))

    def end(self) -> None:
        """Drop the delayed lines, because the connection ends."""
        for line in self._pending:
            line.cancel()
        self._pending.clear()
