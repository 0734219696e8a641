"""What is measured, who does it, and what is aimed at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvwire.limits import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every contender of a case does in a round.

    Attributes:
        verb: Such as ``"round trip"``, ``"send"``, ``"put"`` or ``"get"``.
        nbytes: Bytes in one operation.
        count: Operations in a round.
        in_flight: Operations begun before the first has to be over.
    """

    verb: str
    nbytes: int
    count: int
    in_flight: int = 1

    @property
    def moved_bytes(self) -> int:
        """Bytes of a round."""
        return self.nbytes * self.count


@dataclass(frozen=True, slots=True)
class Unit:
    """How the samples of a case are read.

    Attributes:
        name: Behind the number, such as ``"us"``.
        scale: One sample times this is the number shown.
        less_is_better: True of a time, false of a rate.
    """

    name: str
    scale: float
    less_is_better: bool


MILLISECONDS = Unit("ms", 1e3, less_is_better=True)
MICROSECONDS = Unit("us", 1e6, less_is_better=True)
GIGABYTES_PER_SECOND = Unit("GB/s", 1e-9, less_is_better=False)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one contender did in one round.

    Attributes:
        values: Seconds, or bytes a second, as the case's unit says.
        moved_bytes: From one side to the other.
        cpu_s: CPU seconds of both sides together.
        sides_cpu_s: Of the left and of the right side, where they are known apart.
    """

    values: Sequence[float]
    moved_bytes: int
    cpu_s: float
    sides_cpu_s: tuple[float, float] | None = None


class Contender(ABC):
    """One way to do the work: kvwire, or what stands beside it.

    Attributes:
        name: As it is shown.
        streams: It moves bytes side by side, which have no layout.
        note: A line that a reader of the table needs; "" for none.
    """

    name: str
    streams: bool = False
    note: str = ""

    @abstractmethod
    def start(self) -> None:
        """Get ready: start processes, connect them.

        Raises:
            BenchError: It cannot run here.
        """

    @abstractmethod
    def check(self, work: Work) -> None:
        """Show that the bytes arrive as they were sent; not timed.

        Raises:
            BenchError: They do not.
        """

    @abstractmethod
    def round(self, work: Work) -> Sample:
        """Do the work once.

        Raises:
            BenchError: It broke.
        """

    @abstractmethod
    def stop(self) -> None:
        """End what was started; never raises."""

    def facts(self) -> dict[str, Any]:
        """Versions and settings, for the JSON document."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    Attributes:
        name: What the row says.
        work: The work.
        unit: How its samples are read.
        ours: The contender that is judged.
        beside: Those it is compared with; the best of them counts.
        target: The ratio aimed at: at most that for times, at least that for rates;
            None for none.
        tail: Whether the 99th percentile of the samples means anything.
        group: What rows that are shown together have alike.
        essential: It says nothing without ours.
    """

    name: str
    work: Work
    unit: Unit
    ours: Contender
    beside: Sequence[Contender]
    target: float | None = None
    tail: bool = False
    group: str = ""
    essential: bool = True

    @property
    def contenders(self) -> list[Contender]:
        """Everybody who does its work."""
        return [self.ours, *self.beside]

    @property
    def required(self) -> list[Contender]:
        """Those without whom it says nothing."""
        return [self.ours] if self.essential else []


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that would have been measured too.

    Attributes:
        name: What.
        remedy: What would change that.
        reason: Why it was not.
    """

    name: str
    remedy: str
    reason: str = "is not installed"

    def __str__(self) -> str:
        return f"{self.name} {self.reason} and was left out: {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """Who stands beside kvwire.

    Attributes:
        movers: Those who move bytes; of a store by tier: ``"disk"``, ``"server over
            tcp"``.
        matchers: Those who look hashes up, likewise.
        missing: Who could not take part, and what would change that.
        notes: Lines that a reader of the table needs.
    """

    movers: Mapping[str, Sequence[Contender]] = field(default_factory=dict)
    matchers: Mapping[str, Sequence[Contender]] = field(default_factory=dict)
    missing: Sequence[Missing] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A named list of cases.

    Attributes:
        name: The command's name.
        cases: Its rows.
        missing: Who could not take part, and what would change that.
        notes: Lines that a reader of the table needs.
        ours: Names of those that are kvwire, where they are several.
    """

    name: str
    cases: Sequence[Case]
    missing: Sequence[Missing] = ()
    notes: Sequence[str] = ()
    ours: Sequence[str] = ()

    @property
    def contenders(self) -> list[Contender]:
        """Everybody who takes part, each once."""
        found: dict[int, Contender] = {}
        for case in self.cases:
            for contender in case.contenders:
                found[id(contender)] = contender
        return list(found.values())


@dataclass(slots=True)
class Samples:
    """Everything one contender did in one case.

    Attributes:
        rounds: One sample a round.
    """

    rounds: list[Sample] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """All of them."""
        return [value for sample in self.rounds for value in sample.values]

    @property
    def cpu_s_per_gib(self) -> float:
        """CPU seconds of both sides for a GiB moved: the median of the rounds."""
        return median(s.cpu_s * GIB / s.moved_bytes for s in self.rounds)

    @property
    def sides_cpu_s_per_gib(self) -> tuple[float, float] | None:
        """Likewise of the left and of the right side, where they are known apart."""
        each = [(s.sides_cpu_s, s.moved_bytes) for s in self.rounds]
        known = [(sides, moved) for sides, moved in each if sides is not None]
        if not known:
            return None
        left, right = (
            median(sides[side] * GIB / moved for sides, moved in known)
            for side in (0, 1)
        )
        return left, right
