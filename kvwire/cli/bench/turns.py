"""Cases, and the rounds in which everybody takes turns.

A machine is not the same from one minute to the next. So nobody does all of their work
at once: in each round every contender of every case does a little, one after the other,
and who begins changes from round to round.

A contender that fails is out of that case, with its reason, and is started anew before
its next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from rich.console import RenderableType

from kvwire.cli.bench.pair import BenchError, Contender, Pair, Sample
from kvwire.limits import GIB


@dataclass(frozen=True, slots=True)
class Unit:
    """How samples are read: times ``scale`` they are shown, with ``name`` behind."""

    name: str
    scale: float
    less_is_better: bool


MILLISECONDS = Unit("ms", 1e3, less_is_better=True)
MICROSECONDS = Unit("us", 1e6, less_is_better=True)
GIGABYTES_PER_SECOND = Unit("GB/s", 1e-9, less_is_better=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table; its first contender is judged by the best of the others."""

    name: str
    # Of a subclass of Work.
    work: Any
    unit: Unit
    contenders: Sequence[Contender]
    # The ratio aimed at: at most that for times, at least that for rates.
    target: float | None = None
    # Whether the 99th percentile of the samples means anything.
    tail: bool = False
    # What rows that are shown together have alike.
    group: str = ""


@dataclass(frozen=True, slots=True)
class Missing:
    """What would have been measured too, and what would change that."""

    name: str
    remedy: str
    reason: str = "is not installed"

    def __str__(self) -> str:
        return f"{self.name} {self.reason} and was left out: {self.remedy}"


@dataclass(slots=True)
class Samples:
    """Everything one contender did in one case, a sample a round."""

    rounds: list[Sample] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """All of them."""
        return [value for sample in self.rounds for value in sample.values]

    @property
    def median(self) -> float:
        """Half of the values are smaller."""
        return median(self.values)

    @property
    def p99(self) -> float:
        """The nearest-rank percentile: it is one of the values."""
        ordered = sorted(self.values)
        return ordered[-(-99 * len(ordered) // 100) - 1]

    @property
    def sides_cpu_s_per_gib(self) -> list[float]:
        """CPU seconds of each side for a GiB moved: the median of the rounds."""
        each = [[s * GIB / r.moved_bytes for s in r.cpu_s] for r in self.rounds]
        return [median(side) for side in zip(*each, strict=True)]

    @property
    def cpu_s_per_gib(self) -> float:
        """Likewise of both sides together."""
        return median(sum(r.cpu_s) * GIB / r.moved_bytes for r in self.rounds)

    def document(self) -> dict[str, Any]:
        """Return all of it; mad is the median absolute deviation from the median."""
        values, middle = self.values, self.median
        return {
            "count": len(values),
            "median": middle,
            "p99": self.p99,
            "mad": median(abs(value - middle) for value in values),
            "low": min(values),
            "high": max(values),
            "cpu_s_per_gib": self.cpu_s_per_gib,
            "sides_cpu_s_per_gib": self.sides_cpu_s_per_gib,
            "rounds": [list(sample.values) for sample in self.rounds],
        }


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What was measured in a case, who failed and why, and facts, by contender."""

    case: Case
    samples: dict[str, Samples]
    failures: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)


Findings = Sequence[CaseResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A named list of cases, who is missing, and notes for a reader of the table."""

    name: str
    cases: Sequence[Case]
    missing: Sequence[Missing] = ()
    notes: Sequence[str] = ()
    # Makes several rows of one case.
    split: Callable[[CaseResult], Findings] = lambda found: [found]
    # Makes what is shown below the table, and more keys of the document.
    below: Callable[[Findings], Sequence[RenderableType]] = lambda _: ()
    more: Callable[[Findings], Mapping[str, Any]] = lambda _: {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The first contender beside the best of those that are not kvwire.

    The lowest and highest ratio are those of single rounds. Nothing is known if nobody
    else took part; ``met`` is only where there is a target.
    """

    best: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    met: bool | None = None


def compare(finding: CaseResult) -> Comparison:
    """Judge a case by its medians."""
    case, samples = finding.case, finding.samples
    less, (first, *others) = case.unit.less_is_better, case.contenders
    beside = {
        one.name: samples[one.name].median
        for one in others
        if one.name in samples and not (first.ours and one.ours)
    }
    if not beside or first.name not in samples:
        return Comparison()
    best = (min if less else max)(beside, key=beside.__getitem__)
    ratio = samples[first.name].median / beside[best]
    # Of the rounds that both have done: an interrupt can come between them.
    both = zip(samples[first.name].rounds, samples[best].rounds, strict=False)
    each = [median(mine.values) / median(theirs.values) for mine, theirs in both]
    met = None
    if case.target is not None:
        met = ratio <= case.target if less else ratio >= case.target
    return Comparison(best=best, ratio=ratio, low=min(each), high=max(each), met=met)


def part_of(
    found: CaseResult, name: str, part: Callable[[Sequence[float]], Sequence[float]]
) -> CaseResult:
    """Make a row of a part of the values of each round."""
    samples = {
        who: Samples([replace(one, values=part(one.values)) for one in these.rounds])
        for who, these in found.samples.items()
    }
    return replace(found, case=replace(found.case, name=name), samples=samples)


def steps(plan: Benchmark, rounds: int) -> int:
    """How often :func:`take_turns` reports progress, unless somebody fails."""
    return (rounds + 1) * sum(len(case.contenders) for case in plan.cases)


def take_turns(
    plan: Benchmark, rounds: int, progress: Callable[[str], None]
) -> list[CaseResult]:
    """Run a benchmark: so many rounds, after one that checks and does not count.

    Ctrl-C ends it with what there is, and is raised where there is nothing yet.
    """
    findings = [
        CaseResult(case, {one.name: Samples() for one in case.contenders})
        for case in plan.cases
    ]
    team = _Team()
    try:
        for number in range(-1, rounds):
            for finding in findings:
                everybody = finding.case.contenders
                first = number % len(everybody)
                for contender in [*everybody[first:], *everybody[:first]]:
                    if contender.name not in finding.failures:
                        progress(f"{finding.case.name}: {contender.name}")
                        team.take_turn(finding, contender, number)
    except KeyboardInterrupt:
        for finding in findings:
            for name in [n for n, s in finding.samples.items() if not s.rounds]:
                del finding.samples[name]
                finding.failures[name] = "it was interrupted before its first round"
        if not any(finding.samples for finding in findings):
            raise
    finally:
        team.stop()
    return findings


class _Team:
    """Who runs, and who could not be started, which is not tried again."""

    def __init__(self) -> None:
        self._running: dict[Contender, Pair] = {}
        self._unable: dict[Contender, BenchError] = {}

    def take_turn(self, finding: CaseResult, contender: Contender, number: int) -> None:
        owner = contender.beside or contender
        try:
            pair = self._ready(owner)
            finding.facts[contender.name] = pair.facts
            work = replace(finding.case.work, **contender.asks)
            if number < 0:
                pair.check(work)
            sample = pair.round(work)
            if number >= 0:
                finding.samples[contender.name].rounds.append(sample)
        except BenchError as exc:
            if running := self._running.pop(owner, None):
                running.stop()
            del finding.samples[contender.name]
            finding.failures[contender.name] = str(exc)

    def stop(self) -> None:
        for pair in self._running.values():
            pair.stop()

    def _ready(self, contender: Contender) -> Pair:
        if contender in self._unable:
            raise self._unable[contender]
        if contender not in self._running:
            try:
                self._running[contender] = contender.start()
            except BenchError as exc:
                self._unable[contender] = exc
                raise
        return self._running[contender]
