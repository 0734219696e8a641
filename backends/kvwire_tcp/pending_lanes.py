"""Where sockets of lanes come in: each goes to the lane that waits for it, or nowhere.

Whoever connects is a stranger until the proof in its preamble holds. One that is not
expected is reset without a word, so that a scanner learns nothing; how many may knock,
and for how long, are the limits of strangers in general.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod

from kvwire.errors import BackendUnavailable
from kvwire.limits import CONNECTIONS_MAX
from kvwire.types import Address
from kvwire_tcp.options import reset_on_close
from kvwire_tcp.preamble import token_in
from kvwire_tcp.wire import Wire

_log = logging.getLogger("kvwire.tcp")


class PendingLane(ABC):
    """Waits for the socket of one lane."""

    @abstractmethod
    def admits(self, wire: Wire, preamble: bytes) -> bool:
        """Tell whether a preamble proves that this socket is this lane's."""

    @abstractmethod
    def arrived(self, wire: Wire, remote: Address, preamble: bytes) -> None:
        """Take the socket, which is tuned and has received nothing else."""


class PendingLanes:
    """Holds the lanes of one backend that wait for their sockets, by token."""

    def __init__(self) -> None:
        self._lanes: dict[bytes, PendingLane] = {}

    def expect(self, token: bytes, lane: PendingLane) -> None:
        """Let a lane wait."""
        # A connection raises its lanes one after the other.
        if len(self._lanes) >= CONNECTIONS_MAX:
            raise BackendUnavailable(
                f"{CONNECTIONS_MAX} lanes wait for their sockets already"
            )
        self._lanes[token] = lane  # bounded: CONNECTIONS_MAX

    def forget(self, token: bytes) -> None:
        """Remove a lane that waits no more."""
        self._lanes.pop(token, None)

    def claim_socket(self, wire: Wire, remote: Address, preamble: bytes) -> None:
        """Give a socket to its lane, once; any other is reset."""
        token = token_in(preamble)
        lane = self._lanes.get(token)
        if lane is not None and lane.admits(wire, preamble):
            del self._lanes[token]
            lane.arrived(wire, remote, preamble)
            return
        _log.info("%s: a lane that nobody waits for", remote)
        with contextlib.suppress(OSError):
            reset_on_close(wire.sock)
        wire.sock.close()
