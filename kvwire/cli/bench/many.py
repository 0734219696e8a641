"""``kvwire bench many``: many transfers at once, and a small one beside large ones.

What is asked is whether anybody has to wait for somebody else's long prompt. Times are
from the call to the outcome, at the side that pulls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

import kvwire
from kvwire import UsageError
from kvwire.cli.bench.case import Contender
from kvwire.cli.bench.document import machine, samples_of
from kvwire.cli.bench.fragments import registered, size_name
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
from kvwire.cli.bench.table import MET, MISSED, new_table
from kvwire.cli.bench.turns import Finding

# The least whose 99th percentile is not simply the slowest.
TIMED: Final = 101
BESIDE_TARGET: Final = 3.0
# Between the priority of those beside it and the highest there is.
URGENT: Final = 1


@dataclass(frozen=True, slots=True)
class Load:
    """One row: a work, done over every transport."""

    name: str
    work: ManyWork
    contenders: Sequence[Contender]
    required: Sequence[Contender] = ()


@dataclass(frozen=True, slots=True)
class Many:
    """The benchmark.

    Attributes:
        alone: One after the other, and nothing else.
        beside: Likewise, while others are under way on the same connection.
        urgent: Likewise, with a priority.
        small: The smallest one after the other.
        mixed: All at once.
        contenders: A transport each.
        endpoints: Communicators on each side.
    """

    alone: Load
    beside: Load
    urgent: Load
    small: Load
    mixed: Load
    contenders: Sequence[Contender]
    endpoints: int

    @property
    def cases(self) -> list[Load]:
        """In the order in which they are run."""
        return [self.alone, self.beside, self.urgent, self.small, self.mixed]


def many(
    *,
    transports: Sequence[str],
    loop: str,
    endpoints: int,
    transfers: int,
    others: int,
    other_bytes: int,
    large_bytes: int,
) -> Many:
    """The benchmark.

    Raises:
        UsageError: A transport that does not join two processes, or that nobody knows.
    """
    contenders = [_contender(t, loop, endpoints) for t in transports]
    beside = ManyWork(
        verb=BESIDE,
        nbytes=MEDIUM_BYTES,
        count=TIMED,
        others=others,
        other_bytes=other_bytes,
    )
    urgent = ManyWork(**{**asdict(beside), "priority": URGENT})
    alone = ManyWork(verb=ONE_BY_ONE, nbytes=MEDIUM_BYTES, count=TIMED)
    small = ManyWork(verb=ONE_BY_ONE, nbytes=SMALL_BYTES, count=TIMED)
    mixed = ManyWork(verb=AT_ONCE, nbytes=large_bytes, count=transfers)
    crowd = f"beside {others} x {size_name(other_bytes)}"
    medium = size_name(MEDIUM_BYTES)
    return Many(
        alone=Load(f"{medium} alone", alone, contenders),
        beside=Load(f"{medium} {crowd}", beside, contenders),
        urgent=Load(f"{medium} {crowd}, priority {URGENT}", urgent, contenders),
        small=Load(f"{size_name(SMALL_BYTES)} alone", small, contenders),
        mixed=Load(f"{transfers} at once", mixed, contenders),
        contenders=contenders,
        endpoints=endpoints,
    )


def render(benchmark: Many, findings: Sequence[Finding[Load]]) -> RenderableType:
    """A table for each transport, and who failed."""
    parts: list[RenderableType] = []
    for contender in benchmark.contenders:
        parts += _table(benchmark, findings, contender.name)
    for finding in findings:
        for name, reason in finding.failures.items():
            parts.append(Text(f"{name} failed, {finding.case.name}: {reason}"))
    return Group(*parts)


def document(
    benchmark: Many, findings: Sequence[Finding[Load]], settings: dict[str, Any]
) -> dict[str, Any]:
    """The JSON document; times are seconds."""
    return {
        "benchmark": "many",
        "kvwire": kvwire.__version__,
        "settings": settings,
        "machine": machine(),
        "cases": [
            {
                "name": finding.case.name,
                "work": asdict(finding.case.work),
                "contenders": {
                    name: samples_of(samples)
                    for name, samples in finding.samples.items()
                },
                "failures": finding.failures,
                "by_size": {
                    name: {
                        size_name(nbytes): asdict(summary)
                        for nbytes, summary in by_size(finding, name).items()
                    }
                    for name in finding.samples
                },
            }
            for finding in findings
        ],
        "contenders": {c.name: dict(c.facts()) for c in benchmark.contenders},
    }


def by_size(finding: Finding[Load], name: str) -> dict[int, Summary]:
    """The times of one contender, by the size of the transfer, of all rounds."""
    sizes = finding.case.work.sizes()
    values: dict[int, list[float]] = {}
    for sample in finding.samples[name].rounds:
        for nbytes, elapsed_s in zip(sizes, sample.values, strict=True):
            values.setdefault(nbytes, []).append(elapsed_s)
    return {nbytes: Summary.of(values[nbytes]) for nbytes in sorted(values)}


def _contender(transport: str, loop: str, endpoints: int) -> Contender:
    if transport not in registered():
        raise UsageError(
            f"--transport {transport}: no such backend is installed; there are "
            f"{', '.join(registered())}"
        )
    options = [f"transport={transport}", f"loop={loop}", f"endpoints={endpoints}"]
    return PairContender(f"kvwire {transport}", "many", options)


def _table(
    benchmark: Many, findings: Sequence[Finding[Load]], name: str
) -> Iterator[RenderableType]:
    count = benchmark.endpoints
    yield Text(
        f"{name}, {count} x {count} connections: from the call to the outcome, ms",
        style="italic",
    )
    table = new_table()
    for column in ("count", "p50", "p99", "to alone"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    found = {f.case.name: by_size(f, name) for f in findings if name in f.samples}
    alone = {
        nbytes: summary.p99
        for load in (benchmark.alone, benchmark.small)
        for nbytes, summary in found.get(load.name, {}).items()
    }
    for load in benchmark.cases:
        for nbytes, summary in found.get(load.name, {}).items():
            mixed = load is benchmark.mixed
            crowded = load in (benchmark.beside, benchmark.urgent)
            ratio = summary.p99 / alone[nbytes] if nbytes in alone else None
            table.add_row(
                f"{load.name}: {size_name(nbytes)}" if mixed else load.name,
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
