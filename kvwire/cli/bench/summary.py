"""Many samples in few numbers, and two lists of samples in one ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kvwire.cli.bench.case import Case, Samples
from kvwire.cli.bench.turns import CaseResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A list of samples.

    Attributes:
        count: How many.
        median: Half are smaller.
        p99: 99 of 100 are smaller.
        mad: Median absolute deviation from the median: how far a typical one is off.
        low: The smallest.
        high: The largest.
    """

    count: int
    median: float
    p99: float
    mad: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarise at least one sample."""
        ordered = sorted(values)
        middle = median(ordered)
        return cls(
            count=len(ordered),
            median=middle,
            # The nearest-rank percentile: it is one of the samples.
            p99=ordered[-(-99 * len(ordered) // 100) - 1],
            mad=median(abs(value - middle) for value in ordered),
            low=ordered[0],
            high=ordered[-1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Ours beside the best of the others.

    Attributes:
        best: Whose median is the best; "" if nobody else took part.
        ratio: Our median divided by that one; None if there is none.
        low: The smallest ratio of one round's medians.
        high: The largest.
        met: Whether the ratio is what was aimed at; None if there is none.
    """

    best: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    met: bool | None = None


def compare(finding: CaseResult) -> Comparison:
    """Judge a case by its medians."""
    case = finding.case
    others = {
        contender.name: median(finding.samples[contender.name].values)
        for contender in case.beside
        if contender.name in finding.samples
    }
    if not (others and case.essential):
        return Comparison()
    best = (min if case.unit.less_is_better else max)(others, key=others.__getitem__)
    ours = finding.samples[case.ours.name]
    ratio = median(ours.values) / others[best]
    each = _by_round(ours, finding.samples[best])
    return Comparison(
        best=best, ratio=ratio, low=min(each), high=max(each), met=_met(case, ratio)
    )


def _met(case: Case, ratio: float) -> bool | None:
    if case.target is None:
        return None
    return ratio <= case.target if case.unit.less_is_better else ratio >= case.target


def _by_round(ours: Samples, theirs: Samples) -> list[float]:
    """Of the rounds that both have done: an interrupt can come between them."""
    return [
        median(mine.values) / median(other.values)
        for mine, other in zip(ours.rounds, theirs.rounds, strict=False)
    ]
