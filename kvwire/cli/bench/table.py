"""A benchmark as a table of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from rich.box import SIMPLE_HEAD, Box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvwire.cli.bench.case import Benchmark, Case, Samples
from kvwire.cli.bench.summary import Comparison, Summary, compare
from kvwire.cli.bench.turns import CaseResult

# At most; a file or a pipe is as wide.
WIDTH: Final = 80
OURS: Final = "kvwire"
MET: Final = Text("met", style="green")
MISSED: Final = Text("missed", style="red")


def render(benchmark: Benchmark, findings: Sequence[CaseResult]) -> RenderableType:
    """Two tables, and the lines below them."""
    return Group(
        _judged(benchmark, findings),
        Text(),
        _everybody(findings),
        Text(),
        *(Text(line) for line in lines_below(benchmark, findings)),
    )


def _judged(benchmark: Benchmark, findings: Sequence[CaseResult]) -> Table:
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
            "" if comparison.ratio is None else short(comparison.ratio),
            _target(case, comparison),
        )
    return table


def _target(case: Case, comparison: Comparison) -> Text:
    if case.target is None:
        return Text()
    aim = f"{'<=' if case.unit.less_is_better else '>='} {case.target:g} "
    return Text(aim) + {None: Text(""), True: MET, False: MISSED}[comparison.met]


def _best(finding: CaseResult, comparison: Comparison) -> str:
    if not comparison.best:
        return "nobody took part"
    middle = median(finding.samples[comparison.best].values)
    return f"{_shown(finding.case, middle)} {comparison.best}"


def _everybody(findings: Sequence[CaseResult]) -> Table:
    """Who did what, and what it cost: CPU seconds of both sides for a GiB.

    kvwire is one column, whichever transport a row names.
    """
    table = new_table("everybody: median, CPU s/GiB")
    by_column = [
        {(OURS if n == f.case.ours.name else n): s for n, s in f.samples.items()}
        for f in findings
    ]
    names = list(dict.fromkeys(name for samples in by_column for name in samples))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for finding, samples in zip(findings, by_column, strict=True):
        cells = [_cell(finding.case, samples.get(name)) for name in names]
        table.add_row(_name(finding.case), *cells)
    return table


def _cell(case: Case, samples: Samples | None) -> str:
    if samples is None:
        return ""
    shown = _shown(case, median(samples.values))
    return (
        shown if case.unit.less_is_better else f"{shown} {short(samples.cpu_s_per_gib)}"
    )


def new_table(title: str | None = None, box: Box = SIMPLE_HEAD) -> Table:
    """An empty one with a column for what a row is; its columns touch a line."""
    table = Table(
        title=title,
        title_justify="left",
        box=box,
        padding=(0, 1 if box is SIMPLE_HEAD else 0, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("what", no_wrap=True)
    return table


def _name(case: Case) -> str:
    return f"{case.name}, {case.unit.name}"


def _shown(case: Case, value: float) -> str:
    scaled = value * case.unit.scale
    if case.unit.less_is_better:
        return f"{scaled:.{1 if scaled < 1000 else 0}f}"
    return short(scaled)


def short(value: float) -> str:
    """A number of at least three digits, in four characters up to 9999."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def lines_below(benchmark: Benchmark, findings: Sequence[CaseResult]) -> Iterator[str]:
    """Notes, who failed and why, and who was not there."""
    yield from benchmark.notes
    places: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        for name, reason in finding.failures.items():
            places.setdefault((name, reason), []).append(finding.case.name)
    for (name, reason), where in places.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        yield f"{name} failed, {where[0]}{more}: {reason}"
    yield from map(str, benchmark.missing)
