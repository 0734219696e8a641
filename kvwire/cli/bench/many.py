"""``kvwire bench many``: many transfers at once, and a small one beside large ones.

What is asked is whether anybody has to wait for somebody else's long prompt. Times are
from the call to the outcome, at the side that pulls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from kvwire.cli.bench import document as documents
from kvwire.cli.bench.case import MILLISECONDS, Benchmark, Case
from kvwire.cli.bench.fragments import require_known, size_name
from kvwire.cli.bench.many_work import (
    AT_ONCE,
    BESIDE,
    MEDIUM_BYTES,
    ONE_BY_ONE,
    SMALL_BYTES,
    ManyWork,
)
from kvwire.cli.bench.pair import PairContender
from kvwire.cli.bench.summary import Summary
from kvwire.cli.bench.table import MET, MISSED, lines_below, new_table
from kvwire.cli.bench.turns import CaseResult

# The least whose 99th percentile is not simply the slowest.
TIMED: Final = 101
BESIDE_TARGET: Final = 3.0
# Between the priority of those beside it and the highest there is.
URGENT: Final = 1


def many(
    *,
    transports: Sequence[str],
    loop: str,
    endpoints: int,
    transfers: int,
    others: int,
    other_bytes: int,
    large_bytes: int,
) -> Benchmark:
    """Make the benchmark: one alone, one beside others, and many at once.

    Raises:
        UsageError: A transport that does not join two processes, or that nobody knows.
    """
    require_known(transports, processes=True)
    pairs = [
        PairContender(
            f"kvwire {name}",
            "many",
            [f"transport={name}", f"loop={loop}", f"endpoints={endpoints}"],
        )
        for name in transports
    ]
    medium = size_name(MEDIUM_BYTES)
    crowd = f"beside {others} x {size_name(other_bytes)}"
    alone = ManyWork(verb=ONE_BY_ONE, nbytes=MEDIUM_BYTES, count=TIMED)
    beside = replace(alone, verb=BESIDE, others=others, other_bytes=other_bytes)
    works = {
        f"{medium} alone": alone,
        f"{medium} {crowd}": beside,
        f"{medium} {crowd}, priority {URGENT}": replace(beside, priority=URGENT),
        f"{size_name(SMALL_BYTES)} alone": replace(alone, nbytes=SMALL_BYTES),
        f"{transfers} at once": ManyWork(
            verb=AT_ONCE, nbytes=large_bytes, count=transfers
        ),
    }
    return Benchmark(
        name="many",
        cases=[
            Case(
                name=name,
                work=work,
                unit=MILLISECONDS,
                ours=pairs[0],
                beside=pairs[1:],
                group=work.verb,
                essential=False,
            )
            for name, work in works.items()
        ],
        notes=[f"{endpoints} x {endpoints} connections. From the call to the outcome."],
    )


def render(benchmark: Benchmark, findings: Sequence[CaseResult]) -> RenderableType:
    """A table for each transport, and who failed."""
    parts: list[RenderableType] = []
    for contender in benchmark.contenders:
        parts += _table(findings, contender.name)
    return Group(*parts, *map(Text, lines_below(benchmark, findings)))


def document(
    benchmark: Benchmark, findings: Sequence[CaseResult], settings: dict[str, Any]
) -> dict[str, Any]:
    """The JSON document: that of every benchmark, with the times by size."""
    found = documents.document(benchmark, findings, settings)
    for row, finding in zip(found["cases"], findings, strict=True):
        row["by_size"] = {
            name: {size_name(n): asdict(s) for n, s in by_size(finding, name).items()}
            for name in finding.samples
        }
    return found


def by_size(finding: CaseResult, name: str) -> dict[int, Summary]:
    """The times of one contender, by the size of the transfer, of all rounds."""
    assert isinstance(finding.case.work, ManyWork)
    sizes = finding.case.work.sizes()
    values: dict[int, list[float]] = {}
    for sample in finding.samples[name].rounds:
        for nbytes, elapsed_s in zip(sizes, sample.values, strict=True):
            values.setdefault(nbytes, []).append(elapsed_s)
    return {nbytes: Summary.of(values[nbytes]) for nbytes in sorted(values)}


def _table(findings: Sequence[CaseResult], name: str) -> Iterator[RenderableType]:
    table = new_table(f"{name}: ms")
    for column in ("count", "p50", "p99", "to alone"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    found = [(f.case, by_size(f, name)) for f in findings if name in f.samples]
    alone = {
        nbytes: summary.p99
        for case, sizes in found
        if case.group == ONE_BY_ONE
        for nbytes, summary in sizes.items()
    }
    for case, sizes in found:
        for nbytes, summary in sizes.items():
            mixed, crowded = case.group == AT_ONCE, case.group == BESIDE
            ratio = summary.p99 / alone[nbytes] if nbytes in alone else None
            table.add_row(
                f"{case.name}: {size_name(nbytes)}" if mixed else case.name,
                str(summary.count),
                f"{summary.median * 1e3:.1f}",
                f"{summary.p99 * 1e3:.1f}",
                f"{ratio:.1f}" if ratio and (mixed or crowded) else "",
                _verdict(ratio) if ratio and crowded else "",
            )
    yield table
    yield Text()


def _verdict(ratio: float) -> Text:
    return Text(f"<= {BESIDE_TARGET:g} ") + (MET if ratio <= BESIDE_TARGET else MISSED)
