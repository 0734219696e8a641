"""The time that one end of a KV transfer spent in each phase."""

from __future__ import annotations

from time import monotonic
from typing import Literal

from kvwire.kv.outcome import Timings, timings_of

Phase = Literal[
    "queue", "memory_wait", "handshake", "mark_wait", "wire", "commit", "lost"
]


class PhaseTimer:
    """Divides the time of a transfer into phases; one phase is current at each moment.

    Args:
        created: The time of the call; None for now.
        phase: The first phase.

    Attributes:
        phase: The current phase, named by the thing that the transfer waits for.
    """

    __slots__ = ("_since", "_spent", "created", "phase")

    def __init__(self, created: float | None = None, phase: Phase = "queue") -> None:
        self.created: float = monotonic() if created is None else created
        self.phase: Phase = phase
        self._since = self.created
        self._spent: dict[Phase, float] = {}

    @property
    def age_s(self) -> float:
        """Return the seconds since the transfer was requested."""
        return monotonic() - self.created

    def enter(self, phase: Phase, ago_s: float = 0.0) -> None:
        """Change the phase, now or as of a moment ago."""
        at = max(self._since, monotonic() - ago_s)
        self._spent[self.phase] = self._spent.get(self.phase, 0.0) + at - self._since
        self._since = at
        self.phase = phase

    def timings(self) -> Timings:
        """Return the time spent in each phase until now."""
        now = monotonic()
        spent = self._spent
        spent[self.phase] = spent.get(self.phase, 0.0) + now - self._since
        self._since = now
        return timings_of(
            queue_s=spent.get("queue", 0.0),
            handshake_s=spent.get("handshake", 0.0),
            memory_wait_s=spent.get("memory_wait", 0.0),
            mark_wait_s=spent.get("mark_wait", 0.0),
            wire_s=spent.get("wire", 0.0),
            commit_s=spent.get("commit", 0.0),
            lost_s=spent.get("lost", 0.0),
        )
