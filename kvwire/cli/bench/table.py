"""A benchmark as a table of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvwire.cli.bench.case import Benchmark, Case, Samples
from kvwire.cli.bench.summary import Comparison, Summary, compare
from kvwire.cli.bench.turns import Finding

MET: Final = Text("met", style="green")
MISSED: Final = Text("missed", style="red")


def render(benchmark: Benchmark, findings: Sequence[Finding[Case]]) -> RenderableType:
    """Two tables, and the lines below them."""
    return Group(
        _judged(benchmark, findings),
        Text(),
        _everybody(findings),
        Text(),
        *(Text(line) for line in lines_below(benchmark, findings)),
    )


def _judged(benchmark: Benchmark, findings: Sequence[Finding[Case]]) -> Table:
    table = new_table(f"kvwire bench {benchmark.name}: medians")
    for name in ("kvwire", "p99", "best beside it", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    for finding in findings:
        case, comparison = finding.case, compare(finding)
        ours = Summary.of(finding.samples[case.ours.name].values)
        table.add_row(
            _name(case),
            _shown(case, ours.median),
            _shown(case, ours.p99) if case.tail else "",
            _best(finding, comparison),
            "" if comparison.ratio is None else f"{comparison.ratio:.2f}",
            _target(case, comparison),
        )
    return table


def _target(case: Case, comparison: Comparison) -> Text:
    if case.target is None:
        return Text()
    aim = f"{'<=' if case.unit.less_is_better else '>='} {case.target:g} "
    return Text(aim) + {None: Text(""), True: MET, False: MISSED}[comparison.met]


def _best(finding: Finding[Case], comparison: Comparison) -> str:
    if not comparison.best:
        return "nobody took part"
    middle = median(finding.samples[comparison.best].values)
    return f"{_shown(finding.case, middle)} {comparison.best}"


def _everybody(findings: Sequence[Finding[Case]]) -> Table:
    """Who did what, and what it cost: CPU seconds of both sides for a GiB."""
    table = new_table("everybody: median, CPU s/GiB")
    names = list(dict.fromkeys(name for f in findings for name in f.samples))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for finding in findings:
        cells = [
            _cell(finding.case, finding.samples[name])
            if name in finding.samples
            else ""
            for name in names
        ]
        table.add_row(_name(finding.case), *cells)
    return table


def _cell(case: Case, samples: Samples) -> str:
    shown = _shown(case, median(samples.values))
    return shown if case.unit.less_is_better else f"{shown} {samples.cpu_s_per_gib:.2f}"


def new_table(title: str | None = None) -> Table:
    """An empty one with a column for what a row is."""
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("what", no_wrap=True)
    return table


def _name(case: Case) -> str:
    return f"{case.name}, {case.unit.name}"


def _shown(case: Case, value: float) -> str:
    return f"{value * case.unit.scale:.{1 if case.unit.less_is_better else 2}f}"


def lines_below(
    benchmark: Benchmark, findings: Sequence[Finding[Case]]
) -> Iterator[str]:
    """Notes, who failed and why, and who was not there."""
    yield from benchmark.notes
    for finding in findings:
        for name, reason in finding.failures.items():
            yield f"{name} failed, {finding.case.name}: {reason}"
    for absent in benchmark.missing:
        yield f"{absent.name} is not installed and was left out: {absent.remedy}"
