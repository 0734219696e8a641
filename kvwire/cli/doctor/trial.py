"""What was measured with a peer, and the report that is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvwire.cli.doctor.examination import Examination
from kvwire.types import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast one verb moved fragments of one size.

    Attributes:
        verb: ``"put"`` is to the peer, ``"get"`` from it.
        fragment_bytes: Contiguous bytes, at both ends.
        bytes_per_s: Of the median pass.
        passes: How many were measured.
    """

    verb: Literal["put", "get"]
    fragment_bytes: int
    bytes_per_s: float
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One connection, and what it did.

    Attributes:
        asked: The transport that was required; "" for the configured choice.
        candidates: Every transport that was considered, and why it was taken or not.
        round_trip_s: Median time of 64 B there and back; None if not measured.
        rates: What was measured.
        damaged: What arrived otherwise than it was sent; must be empty.
        error: Why there is no more; "" if all was measured.
    """

    asked: str = ""
    candidates: tuple[Candidate, ...] = ()
    round_trip_s: float | None = None
    rates: tuple[Rate, ...] = ()
    damaged: tuple[str, ...] = ()
    error: str = ""

    @property
    def taken(self) -> str:
        """The transport that was taken; "" if it came to none."""
        return next((c.name for c in self.candidates if c.taken), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """Two hosts and what went on between them.

    Attributes:
        address: Where the attendant listens.
        here: The host of the prober.
        there: That of the attendant; None if it never said.
        trials: One for each connection.
    """

    address: str
    here: Examination
    there: Examination | None
    trials: tuple[Trial, ...]

    @property
    def well(self) -> bool:
        """Something could be measured, and nothing was damaged."""
        measured = any(trial.rates and not trial.error for trial in self.trials)
        return measured and not any(trial.damaged for trial in self.trials)
