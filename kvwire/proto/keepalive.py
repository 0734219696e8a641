"""Does the peer hear of us? A reminder to speak when we have said nothing for long.

A side that only receives says nothing of its own accord. If the other sends faster
than the wire carries, its pings wait behind megabytes of payload, no answer can come in
time, and it would take us for dead. So whoever has sent nothing for an interval speaks
first: the way back is free.

The core is told how many frames were sent and not when. So it looks twice an interval,
and speaks when nothing was sent since the last look: after half an interval of silence
at the earliest, after a whole one at the latest.
"""

from __future__ import annotations

from typing import Final

_LOOKS_PER_INTERVAL: Final = 2


class Keepalive:
    """Watches how often this side speaks.

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
