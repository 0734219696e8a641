"""Whether the peer is alive and receives our bytes: pings, verdict and reminder.

Any byte from the peer is a sign of life. After one interval of silence a PING goes out,
then one more per interval; after ``misses`` intervals without a byte the peer is dead.
PONG is sent by the loop that runs the application, so it proves that this loop turns.
Pings are numbered from 1, and each is answered once, in their order.

A peer that receives nothing may still be able to send: a network can fail in one
direction alone. A side that takes its peer for dead sends that, which may get through.
Where it does not, a PING that has waited for an interval shows the same.

Our own stalls are forgiven: if our timer fires late by more than a tolerance, we were
the ones who did not listen, and the peer's silence is counted from that much later. A
loop blocked for seconds by a GPU synchronisation must not kill healthy peers. What they
sent meanwhile may not have been read yet, so a late look never calls a peer dead: the
next one does, an interval later.
"""

from __future__ import annotations

import enum
from typing import Final

from kvwire.errors import FlowControlViolation, UnexpectedFrame
from kvwire.limits import PINGS_PER_SECOND_MAX, PINGS_SAVED_MAX, STALL_TOLERANCE_S
from kvwire.wire.control import Ping

_NUMBER_MASK: Final = 0xFFFF_FFFF
_LOOKS_PER_INTERVAL: Final = 2


class LivenessVerdict(enum.Enum):
    """Names what is due at a look at the clock."""

    FINE = "fine"
    PING = "ping"
    DEAD = "dead"


class Liveness:
    """Watches one peer.

    Attributes:
        due: When to look at the clock next.
        heard_at: When something arrived last.
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
        "heard_at",
    )

    def __init__(self, *, interval_s: float, misses: int, now: float) -> None:
        self._interval_s = interval_s
        self._misses = misses
        self.heard_at: float = now
        self._last_look = False
        self._pings_left: float = PINGS_PER_SECOND_MAX
        self._pings_left_at = now
        self._sent = 0
        self._answered = 0
        # When the oldest PING without an answer went out, or later.
        self._asked_at = now
        self.due: float = now + interval_s

    def heard(self, now: float) -> None:
        """Note that something arrived, then or later."""
        self.heard_at = max(self.heard_at, now)

    def silence_s(self, now: float) -> float:
        """Return how long the peer has been silent."""
        return now - self.heard_at

    def hears(self, now: float) -> bool:
        """Tell whether the peer receives what we send, judging by its answers."""
        if self._sent == self._answered:
            return True
        return now - self._asked_at < self._interval_s

    def look(self, now: float) -> LivenessVerdict:
        """Judge the silence; call it when ``due`` has come."""
        if now < self.due:
            return LivenessVerdict.FINE
        late_s = now - self.due
        stalled = late_s > STALL_TOLERANCE_S
        if stalled:
            self.heard_at = min(now, self.heard_at + late_s)
        silence_s = now - self.heard_at
        missed = int(silence_s / self._interval_s + 1e-6)
        if missed < self._misses:
            self._last_look = False
            self.due = self.heard_at + (missed + 1) * self._interval_s
            return LivenessVerdict.PING if missed else LivenessVerdict.FINE
        self.due = now + self._interval_s
        if stalled and not self._last_look:
            self._last_look = True
            return LivenessVerdict.PING
        return LivenessVerdict.DEAD

    def ping(self, now: float) -> int:
        """Return the number of our next PING, which goes out now."""
        if self._sent == self._answered:
            self._asked_at = now
        self._sent += 1
        return self._sent & _NUMBER_MASK

    def pong_received(self, body: Ping) -> None:
        """Handle PONG."""
        due, number = self._answered + 1, body.number
        if due > self._sent or number != due & _NUMBER_MASK:
            raise UnexpectedFrame(
                "KVW-LV-01", f"PONG {number}; of {self._sent} pings, {due} is due"
            )
        self._answered = due
        self._asked_at = self.heard_at

    def ping_received(self, now: float) -> None:
        """Handle PING; too many of them are an attack or a bug.

        Each second earns ten, whether they come or not: those that a peer sent while
        nothing could pass arrive together.
        """
        earned = (now - self._pings_left_at) * PINGS_PER_SECOND_MAX
        self._pings_left = min(self._pings_left + earned, PINGS_SAVED_MAX) - 1.0
        self._pings_left_at = now
        if self._pings_left < 0.0:
            raise FlowControlViolation(
                "KVW-LV-02", f"more than {PINGS_PER_SECOND_MAX} pings a second"
            )


class Keepalive:
    """Watches how often this side speaks, and reminds it to when it has been silent.

    A side that only receives says nothing of its own accord. If the other sends faster
    than the wire carries, its pings wait behind megabytes of payload, no answer can
    come in time, and it would take us for dead. So whoever has sent nothing for an
    interval speaks first: the way back is free.

    The core is told how many frames were sent and not when. So it looks twice an
    interval, and speaks when nothing was sent since the last look: after half an
    interval of silence at the earliest, after a whole one at the latest.

    Attributes:
        due: When to look next.
    """

    __slots__ = ("_frames_sent", "_period_s", "due")

    def __init__(self, *, interval_s: float, now: float, frames_sent: int) -> None:
        self._period_s = interval_s / _LOOKS_PER_INTERVAL
        self._frames_sent = frames_sent
        self.due: float = now + self._period_s

    def is_idle(self, frames_sent: int) -> bool:
        """Tell whether nothing was sent since the last look."""
        return frames_sent == self._frames_sent

    def is_due(self, now: float, frames_sent: int) -> bool:
        """Tell whether to send something; call it when ``due`` has come."""
        if now < self.due:
            return False
        silent = frames_sent == self._frames_sent
        self._frames_sent = frames_sent
        self.due = now + self._period_s
        return silent
