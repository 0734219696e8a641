"""What ``kvwire bench fragments`` found, as tables of at most 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from rich.box import MINIMAL
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvwire.cli.bench.case import GIGABYTES_PER_SECOND, Benchmark, Samples
from kvwire.cli.bench.fragment_work import FragmentWork
from kvwire.cli.bench.fragments import TCP, VERBS, WIRES, size_name
from kvwire.cli.bench.table import WIDTH, lines_below, new_table, short
from kvwire.cli.bench.turns import CaseResult

Findings = Sequence[CaseResult]

# A rate, the CPU it took, and a line before them: "12.3 0.45".
_CELL: Final = 9
_DISPLAYED: Final = {False: "a tensor for each layer", True: "blocks across layers"}


def render(benchmark: Benchmark, findings: Findings) -> RenderableType:
    """Rates by wire and verb, the layouts side by side, and who failed."""
    parts: list[RenderableType] = []
    for wire in WIRES:
        for verb in VERBS:
            for cross_layer in (False, True):
                rows = [
                    f
                    for f in findings
                    if (f.case.group, f.case.work.verb) == (wire, verb)
                    and fragment_work(f).cross_layer is cross_layer
                    and f.samples
                ]
                if rows:
                    parts += _rates(benchmark, rows)
    parts += [Text(line) for line in lines_below(benchmark, findings)]
    return Group(*parts)


def _rates(benchmark: Benchmark, rows: Findings) -> Iterator[RenderableType]:
    """A column for each size; below the line, kvwire beside the best of the others.

    Who has failed at every size has no row; the lines below all tables say why.
    """
    first = rows[0].case
    how = _DISPLAYED[fragment_work(rows[0]).cross_layer]
    over = "over TCP" if first.group == TCP else "on one host"
    yield Text(f"{first.work.verb} {over}, {how}: GB/s, CPU s/GiB", style="italic")
    names = [c.name for c in first.contenders if any(c.name in r.samples for r in rows)]
    count = max(1, (WIDTH - max(map(len, names))) // (_CELL + 1))
    for begin in range(0, len(rows), count):
        yield _rates_table(benchmark, rows[begin : begin + count], names)
    yield Text()


def _rates_table(benchmark: Benchmark, rows: Findings, names: Sequence[str]) -> Table:
    table = new_table(box=MINIMAL)
    for row in rows:
        size = size_name(fragment_work(row).layer_bytes)
        table.add_column(size, justify="right", no_wrap=True, width=_CELL)
    for name in names:
        table.add_row(name, *(_cell(row.samples.get(name)) for row in rows))
    ratios = {n: [_ratio(benchmark, row, n) for row in rows] for n in benchmark.ours}
    if any(any(cells) for cells in ratios.values()):
        table.add_section()
        table.add_row("over best other:")
        for name, cells in ratios.items():
            if any(cells):
                table.add_row(name, *cells)
    return table


def _cell(samples: Samples | None) -> str:
    if samples is None:
        return "failed"
    return f"{_gigabytes(samples)} {short(samples.cpu_s_per_gib):>4}"


def _gigabytes(samples: Samples) -> str:
    return short(median(samples.values) * GIGABYTES_PER_SECOND.scale)


def _ratio(benchmark: Benchmark, row: CaseResult, name: str) -> str:
    medians = {
        other: median(row.samples[other].values)
        for other in row.samples
        if other not in benchmark.ours
    }
    if not medians or name not in row.samples:
        return ""
    return f"{short(median(row.samples[name].values) / max(medians.values()))}x    "


def fragment_work(finding: CaseResult) -> FragmentWork:
    """Return the work of a row, which moves fragments."""
    assert isinstance(finding.case.work, FragmentWork)
    return finding.case.work
