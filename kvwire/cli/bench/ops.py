"""``kvwire bench ops``: what one operation costs, and what it consists of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvwire.cli.bench import document as documents
from kvwire.cli.bench.case import (
    MICROSECONDS,
    Benchmark,
    Case,
    Sample,
    Samples,
    Work,
)
from kvwire.cli.bench.fragments import require_known
from kvwire.cli.bench.ops_counts import Counts
from kvwire.cli.bench.ops_work import ROUND_TRIP, OpsWork, operations
from kvwire.cli.bench.pair import PairContender
from kvwire.cli.bench.summary import compare
from kvwire.cli.bench.table import lines_below, new_table, short
from kvwire.cli.bench.turns import CaseResult


class OpsPair(PairContender):
    """Two processes that measure their own CPU."""

    def round(self, work: Work) -> Sample:
        """See Contender."""
        assert isinstance(work, OpsWork)
        self.prepare(work)
        said = asdict(work)
        self._right.ask("serve", work=said)
        left = self._left.call("drive", work=said)
        right = self._right.answer()
        sides = float(left["cpu_s"]), float(right["cpu_s"])
        # With a connection for each, the other side's share of that is not known.
        apart = None if work.fresh else sides
        return Sample(left["values"], work.moved_bytes, sum(sides), apart)


class BarePair(PairContender):
    """Two processes that send bytes, and have no operation but that."""

    def check(self, work: Work) -> None:
        """See Contender."""
        super().check(_bare(work))

    def round(self, work: Work) -> Sample:
        """See Contender."""
        return super().round(_bare(work))


def _bare(work: Work) -> Work:
    return Work(verb=work.verb, nbytes=work.nbytes, count=work.count)


def ops(*, transport: str, loop: str) -> Benchmark:
    """The benchmark.

    Raises:
        UsageError: A transport that nobody knows, or that joins no two processes.
    """
    require_known([transport], processes=True)
    options = [f"transport={transport}", f"loop={loop}"]
    pair = OpsPair(f"kvwire {transport}", "ops", options)
    streams = BarePair(f"{loop} streams", "streams", [f"loop={loop}"])
    return Benchmark(
        name="ops",
        cases=[
            Case(
                name=work.name,
                work=work,
                unit=MICROSECONDS,
                ours=pair,
                beside=[streams] if work.verb == ROUND_TRIP else (),
                target=None,
            )
            for work in operations()
        ],
        notes=[
            "CPU: of the side that asks, and of the other. Calls: of Python.",
            "System: calls of sockets, readv and writev, without the loop's own.",
        ],
    )


def render(
    benchmark: Benchmark, findings: Sequence[CaseResult], counted: Sequence[Counts]
) -> RenderableType:
    """A row for each operation, and the names of its frames below."""
    table = new_table("kvwire bench ops: one operation, medians")
    columns = ["wall us", "CPU us", "CPU us", "calls", "system", "frames"]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    alike: dict[str, list[str]] = {}
    for finding, counts in zip(findings, counted, strict=True):
        case = finding.case
        samples = finding.samples[case.ours.name]
        sides = sides_cpu_s(samples)
        table.add_row(
            case.name,
            f"{1e6 * median(samples.values):.0f}",
            *(["-", "-"] if sides is None else [f"{1e6 * s:.0f}" for s in sides]),
            f"{counts.calls:.0f}",
            f"{counts.system_calls:.0f}",
            f"{sum(counts.frames.values()):.0f}",
        )
        alike.setdefault(frames(counts), []).append(case.name)
    lines = [f"{', '.join(names)}: {said}" for said, names in alike.items()]
    lines += _beside(findings)
    lines += lines_below(benchmark, findings)
    return Group(table, Text(), *map(Text, lines))


def frames(counts: Counts) -> str:
    """Such as ``2 MESSAGE, 1 PUT``; what comes less than once in two is left out."""
    whole = {name: round(number) for name, number in counts.frames.items()}
    return ", ".join(f"{number} {name}" for name, number in whole.items() if number)


def sides_cpu_s(samples: Samples) -> tuple[float, float] | None:
    """CPU seconds of an operation, left and right; None where they are not known."""
    each = [(r.sides_cpu_s, len(r.values)) for r in samples.rounds]
    known = [(sides, count) for sides, count in each if sides is not None]
    if not known:
        return None
    left, right = (median(sides[n] / count for sides, count in known) for n in (0, 1))
    return left, right


def document(
    benchmark: Benchmark,
    findings: Sequence[CaseResult],
    counted: Sequence[Counts],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """The JSON document: that of every benchmark, with the counts of each case."""
    found = documents.document(benchmark, findings, settings)
    for row, finding, counts in zip(found["cases"], findings, counted, strict=True):
        row["cpu_s"] = {n: sides_cpu_s(s) for n, s in finding.samples.items()}
        row["counts"] = asdict(counts)
    return found


def _beside(findings: Sequence[CaseResult]) -> Iterator[str]:
    for finding in findings:
        comparison = compare(finding)
        if comparison.ratio is not None:
            wall_us = 1e6 * median(finding.samples[comparison.best].values)
            yield (
                f"{finding.case.name}: {short(comparison.ratio)} times that of "
                f"{comparison.best}, {wall_us:.0f} us"
            )
