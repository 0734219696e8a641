"""Pings, with which each side checks whether the other is alive and receives.

Any byte from the peer shows that it is alive. After one interval of silence a PING is
sent, then one more per interval; after ``misses`` intervals without a byte the peer
counts as dead. PONG is sent by the application's own event loop, so it proves that this
loop is not blocked. Pings are numbered from 1, and each is answered once, in order.

A network can fail in one direction only, so a peer that receives nothing may still be
able to send. A side that considers its peer dead sends CLOSE with UNRESPONSIVE, which
may get through. If it does not, a PING that is not answered within an interval shows
the same.

A stall on this side does not count against the peer: if our timer fires late by more
than a tolerance, this side was not reading, and that time is not counted as the peer's
silence. A loop blocked for seconds by a GPU synchronisation must not kill healthy
peers. Their bytes may not have been read yet, so a late check never declares a peer
dead; only the next check, an interval later, may.

Pings show that the control link works, and say nothing of the lanes beside it, which
may use another network. A lane has no pings: it fails if payload was announced for it
and has not moved for as long as the peer of a control link may be silent.
"""

from __future__ import annotations

import enum
from typing import Final

from kvwire.errors import FlowControlViolation, UnexpectedFrame
from kvwire.limits import PING_INTERVAL_MIN_S, STALL_TOLERANCE_S
from kvwire.wire.control import Ping

# Twice what an honest peer sends at the shortest interval; gRPC disconnects a client
# that pings too often as well.
PINGS_PER_SECOND_MAX: Final = 10
# The most pings that may arrive at once, when a network recovers after ten minutes.
PINGS_SAVED_MAX: Final = 6000
assert PING_INTERVAL_MIN_S * PINGS_PER_SECOND_MAX >= 2

_NUMBER_MASK: Final = 0xFFFF_FFFF
_LOOKS_PER_INTERVAL: Final = 2


class LivenessVerdict(enum.Enum):
    """The results of a check."""

    FINE = "fine"
    PING = "ping"
    DEAD = "dead"


class Liveness:
    """Judges whether the peer of one connection is alive.

    Attributes:
        due: When to call :meth:`look` next.
        received_at: When bytes from the peer last arrived.
    """

    __slots__ = (
        "_answered",
        "_asked_at",
        "_interval_s",
        "_last_look",
        "_misses",
        "_pings_left",
        "_pings_left_at",
        "_sent",
        "due",
        "received_at",
    )

    def __init__(self, *, interval_s: float, misses: int, now: float) -> None:
        self._interval_s = interval_s
        self._misses = misses
        self.received_at: float = now
        self._last_look = False
        self._pings_left: float = PINGS_PER_SECOND_MAX
        self._pings_left_at = now
        self._sent = 0
        self._answered = 0
        # When the oldest unanswered PING was sent, or later.
        self._asked_at = now
        self.due: float = now + interval_s

    def note_received(self, now: float) -> None:
        """Record that bytes from the peer arrived at ``now``, unless later ones did."""
        self.received_at = max(self.received_at, now)

    def silence_s(self, now: float) -> float:
        """Return the seconds since bytes from the peer last arrived."""
        return now - self.received_at

    def peer_receives(self, now: float) -> bool:
        """Return whether the peer's answers show that it receives from this side."""
        if self._sent == self._answered:
            return True
        return now - self._asked_at < self._interval_s

    def look(self, now: float) -> LivenessVerdict:
        """Return the action for the peer's silence; call it at ``due``."""
        # After: `due` is in the future, by one interval at most. DEAD is returned only
        # by a check that is on time, or that follows a late check that found silence
        # too.
        if now < self.due:
            return LivenessVerdict.FINE
        late_s = now - self.due
        stalled = late_s > STALL_TOLERANCE_S
        if stalled:
            self.received_at = min(now, self.received_at + late_s)
        silence_s = now - self.received_at
        missed = int(silence_s / self._interval_s + 1e-6)
        if missed < self._misses:
            self._last_look = False
            self.due = self.received_at + (missed + 1) * self._interval_s
            return LivenessVerdict.PING if missed else LivenessVerdict.FINE
        self.due = now + self._interval_s
        if stalled and not self._last_look:
            self._last_look = True
            return LivenessVerdict.PING
        return LivenessVerdict.DEAD

    def ping(self, now: float) -> int:
        """Count a PING that is sent now; return its number."""
        if self._sent == self._answered:
            self._asked_at = now
        self._sent += 1
        return self._sent & _NUMBER_MASK

    def pong_received(self, body: Ping) -> None:
        """Handle PONG, which answers the oldest PING."""
        due = self._answered + 1
        number = body.number
        if due > self._sent or number != due & _NUMBER_MASK:
            raise UnexpectedFrame(
                "KVW-LV-01", f"PONG {number}; of {self._sent} pings, {due} is due"
            )
        self._answered = due
        self._asked_at = self.received_at

    def ping_received(self, now: float) -> None:
        """Handle PING; raise if the peer sends too many of them.

        Ten pings per second are allowed. Unused ones are saved, since pings that a peer
        sent while the network was blocked arrive together.
        """
        earned = (now - self._pings_left_at) * PINGS_PER_SECOND_MAX
        self._pings_left = min(self._pings_left + earned, PINGS_SAVED_MAX) - 1.0
        self._pings_left_at = now
        if self._pings_left < 0.0:
            raise FlowControlViolation(
                "KVW-LV-02", f"more than {PINGS_PER_SECOND_MAX} pings a second"
            )


class PayloadWatch:
    """Measures for how long payload waits in one direction of a lane without moving.

    It is asked about twice per interval of the pings, and knows a lane's state at these
    moments only. So it measures up to one period less than the payload has waited.
    """

    __slots__ = ("_moved", "_since")

    def __init__(self) -> None:
        self._moved: object = None
        self._since = 0.0

    def still_s(self, now: float, moved: object, *, waits: bool) -> float:
        """Return the seconds without a movement that were seen while payload waited.

        Args:
            now: The time.
            moved: What was moved so far; any change is a movement.
            waits: Whether payload waits.
        """
        if not waits or moved != self._moved:
            self._moved = moved
            self._since = now
        return now - self._since

    def forgive(self, late_s: float) -> None:
        """Do not count seconds in which this side did nothing."""
        self._since += late_s


class Keepalive:
    """Decides when this side must send a PING because it has sent nothing else.

    A side that only receives has nothing to send. If its peer sends faster than the
    network carries, the peer's pings wait behind megabytes of payload, so no answer can
    arrive in time, and the peer would consider this side dead. So a side that has sent
    nothing for an interval sends a PING, since its own direction is free.

    The core knows how many frames were sent, but not when. So it checks twice per
    interval, and sends a PING if nothing was sent since the last check: after half an
    interval at the earliest, and a whole interval at the latest.

    Attributes:
        due: When to call :meth:`is_due` next.
    """

    __slots__ = ("_frames_sent", "_period_s", "due")

    def __init__(self, *, interval_s: float, now: float, frames_sent: int) -> None:
        self._period_s = interval_s / _LOOKS_PER_INTERVAL
        self._frames_sent = frames_sent
        self.due: float = now + self._period_s

    def is_idle(self, frames_sent: int) -> bool:
        """Return whether nothing was sent since the last check."""
        return frames_sent == self._frames_sent

    def is_due(self, now: float, frames_sent: int) -> bool:
        """Return whether to send a PING now; call it at ``due``."""
        if now < self.due:
            return False
        silent = frames_sent == self._frames_sent
        self._frames_sent = frames_sent
        self.due = now + self._period_s
        return silent
