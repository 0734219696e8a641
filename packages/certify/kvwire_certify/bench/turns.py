"""Cases, and the rounds in which contenders take turns.

A machine's speed changes from one minute to the next. So no contender does all its work
at once. In each round every contender of every case does a little, one after the other,
and each round starts with a different contender.

A contender that fails is removed from that case, with its reason, and is restarted
before its next case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any

from kvwire.limits import GIB
from kvwire_certify.bench.pair import BenchError, Contender, Pair
from kvwire_certify.bench.work import Work


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a case's values: a time, or a rate for the whole round.

    Values, in seconds or bytes per second, are multiplied by ``scale`` and followed by
    ``name``.
    """

    name: str
    scale: float
    is_time: bool = True


MICROSECONDS = Unit("us", 1e6)
GIGABYTES_PER_SECOND = Unit("GB/s", 1e-9, is_time=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: compares the first of ``ours`` with the best of ``beside``."""

    name: str
    work: Work
    unit: Unit
    ours: Sequence[Contender]
    beside: Sequence[Contender] = ()
    # Whether the samples' 99th percentile is meaningful.
    tail: bool = False
    # The common part of rows that are shown together.
    group: str = ""
    # Where the two processes are, and the CPU of each; none for any.
    placement: str = ""
    cpus: Sequence[int] = ()

    @property
    def contenders(self) -> list[Contender]:
        """All contenders of the case."""
        return [*self.ours, *self.beside]


@dataclass(frozen=True, slots=True)
class Missing:
    """A contender that cannot run here, and the remedy."""

    name: str
    remedy: str
    reason: str = "is not installed"

    def __str__(self) -> str:
        return f"{self.name} {self.reason} and was left out: {self.remedy}"


@dataclass(slots=True)
class Samples:
    """One contender's results in a case: values, and the CPU seconds of each side.

    A value is in seconds or in bytes per second, depending on the case's unit. Each
    round adds one list of values.
    """

    moved_bytes: int
    rounds: list[Sequence[float]] = field(default_factory=list)
    cpu_s: list[Sequence[float]] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """The values of all rounds."""
        return [value for values in self.rounds for value in values]

    @property
    def median(self) -> float:
        """Return the median of all values."""
        return median(self.values)

    @property
    def p99(self) -> float:
        """The nearest-rank 99th percentile, which is one of the values."""
        ordered = sorted(self.values)
        return ordered[-(-99 * len(ordered) // 100) - 1]

    @property
    def sides_cpu_s(self) -> list[float]:
        """The CPU seconds of each side in a round: the median of the rounds."""
        return [median(side) for side in zip(*self.cpu_s, strict=True)]

    @property
    def cpu_s_per_gib(self) -> float:
        """Both sides' CPU seconds per GiB moved: the median of the rounds."""
        return median(map(sum, self.cpu_s)) * GIB / max(1, self.moved_bytes)

    def document(self) -> dict[str, Any]:
        """Return all results; mad is the median absolute deviation from the median."""
        values = self.values
        middle = self.median
        return {
            "count": len(values),
            "median": middle,
            "p99": self.p99,
            "mad": median(abs(value - middle) for value in values),
            "low": min(values),
            "high": max(values),
            "sides_cpu_s": self.sides_cpu_s,
            "cpu_s_per_gib": self.cpu_s_per_gib,
            "rounds": [list(values) for values in self.rounds],
        }


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The samples of a case, failures with their reasons, and facts."""

    case: Case
    samples: dict[str, Samples]
    failures: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)


Findings = Sequence[CaseResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """The cases, missing contenders, and notes for a reader of the table."""

    name: str
    cases: Sequence[Case]
    missing: Sequence[Missing] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of the first contender with the best one that is not kvwire.

    The lowest and highest ratio are those of single rounds. All are None if no other
    contender took part.
    """

    best: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


def compare(finding: CaseResult) -> Comparison:
    """Compare a case's contenders by their medians."""
    case = finding.case
    samples = finding.samples
    first = finding.case.ours[0].name
    beside = [one.name for one in case.beside if one.name in samples]
    if not beside or first not in samples:
        return Comparison()
    best = (min if case.unit.is_time else max)(
        beside, key=lambda name: samples[name].median
    )
    ratio = samples[first].median / samples[best].median
    # Only rounds that both have done count: an interrupt may come between them.
    both = zip(samples[first].rounds, samples[best].rounds, strict=False)
    each = [median(mine) / median(theirs) for mine, theirs in both]
    return Comparison(best=best, ratio=ratio, low=min(each), high=max(each))


def steps(plan: Benchmark, rounds: int) -> int:
    """Return how often :func:`take_turns` reports progress if no contender fails."""
    return (rounds + 1) * sum(len(case.contenders) for case in plan.cases)


def take_turns(
    plan: Benchmark, rounds: int, progress: Callable[[str], None]
) -> list[CaseResult]:
    """Run a benchmark: one uncounted round that checks bytes, then ``rounds`` more.

    Ctrl-C ends it early with the results so far; if there are none, it is raised again.
    """
    findings = [CaseResult(case, {}) for case in plan.cases]
    # The running pair, or the reason why it did not start; it is then not tried again.
    pairs: dict[Contender, Pair | BenchError] = {}
    try:
        for number, finding in product(range(-1, rounds), findings):
            everybody = finding.case.contenders
            first = number % len(everybody)
            for contender in [*everybody[first:], *everybody[:first]]:
                if contender.name not in finding.failures:
                    progress(f"{finding.case.name}: {contender.name}")
                    _take_turn(pairs, finding, contender, counts=number >= 0)
    except KeyboardInterrupt:
        why = "it was interrupted before its first round"
        for finding in findings:
            names = {one.name for one in finding.case.contenders}
            for name in names - set(finding.samples):
                finding.failures.setdefault(name, why)
        if not any(finding.samples for finding in findings):
            raise
    finally:
        for pair in pairs.values():
            if isinstance(pair, Pair):
                pair.stop()
    return findings


def _take_turn(
    pairs: dict[Contender, Pair | BenchError],
    finding: CaseResult,
    contender: Contender,
    *,
    counts: bool,
) -> None:
    """Let a contender do its work once; in an uncounted round, check it first."""
    name = contender.name
    work = finding.case.work
    cpus = finding.case.cpus
    try:
        pair = pairs[contender] = pairs.get(contender) or _start(contender)
        if isinstance(pair, BenchError):
            raise pair
        finding.facts[name] = pair.facts
        if not counts:
            pair.turn(work, checks=True, cpus=cpus)
        sample = pair.turn(work, cpus=cpus)
    except BenchError as exc:
        pair = pairs[contender]
        if isinstance(pair, Pair):
            pair.stop()
            del pairs[contender]
        finding.samples.pop(name, None)
        finding.failures[name] = str(exc)
        return
    if counts:
        samples = finding.samples.setdefault(name, Samples(work.moved_bytes))
        rate = [work.moved_bytes / sum(sample.seconds)]
        samples.rounds.append(sample.seconds if finding.case.unit.is_time else rate)
        samples.cpu_s.append(sample.cpu_s)


def _start(contender: Contender) -> Pair | BenchError:
    try:
        return contender.start()
    except BenchError as exc:
        return exc
