"""When what happened to one end of a transfer, and so where its time went."""

from __future__ import annotations

from time import monotonic
from typing import Literal

from kvwire.kv.outcome import Timings

Phase = Literal["met", "agreed", "first", "last", "over"]


class PhaseTimer:
    """Measures the moments between which the time of a transfer is divided.

    * met: the peer's counterpart is known
    * agreed: the plan is made
    * first, last: the first byte is under way, the last one has landed
    * over: the outcome is known

    Args:
        created: When the transfer was asked for; None for now.
    """

    __slots__ = ("_at", "created")

    def __init__(self, created: float | None = None) -> None:
        self.created: float = monotonic() if created is None else created
        self._at: dict[Phase, float] = {}

    @property
    def age_s(self) -> float:
        """Return the seconds since the transfer was asked for."""
        return monotonic() - self.created

    def mark_first(self, phase: Phase) -> None:
        """Note when a phase came first; what an earlier link has noted stands."""
        self._at.setdefault(phase, monotonic())

    def mark_last(self, phase: Phase) -> None:
        """Note when a phase came last."""
        self._at[phase] = monotonic()

    def timings(self, *, memory: bool) -> Timings:
        """Return where the time went; ``memory``: meeting meant waiting for memory."""
        self.mark_first("over")
        over = self._at["over"]
        met = self._at.get("met", over)
        agreed = self._at.get("agreed", over)
        first = self._at.get("first", agreed)
        last = self._at.get("last", first)
        waited = met - self.created
        return Timings(
            queue_s=0.0 if memory else waited,
            handshake_s=agreed - met,
            memory_wait_s=waited if memory else 0.0,
            wire_s=last - first,
            commit_s=over - last,
        )
