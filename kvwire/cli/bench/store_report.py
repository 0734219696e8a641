"""What ``kvwire bench store`` found: a table of at most 80 columns for each tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from kvwire.cli.bench.case import Benchmark, Unit
from kvwire.cli.bench.fragments import size_name
from kvwire.cli.bench.store_work import MATCH, StoreWork
from kvwire.cli.bench.summary import Summary
from kvwire.cli.bench.table import lines_below, new_table
from kvwire.cli.bench.turns import CaseResult

Row: TypeAlias = CaseResult


def render(benchmark: Benchmark, findings: Sequence[Row]) -> RenderableType:
    """A table for each tier, and the lines below them."""
    parts: list[RenderableType] = [
        Text("kvwire bench store: medians; behind those of others kvwire's / theirs")
    ]
    for tier, rows in groupby(findings, key=lambda row: store_work(row).tier):
        parts += _table(tier, list(rows))
    parts += [Text(line) for line in lines_below(benchmark, findings)]
    return Group(*parts)


def _table(tier: str, rows: Sequence[Row]) -> Iterator[RenderableType]:
    """A row for each verb, below its size of blocks; a column for everybody."""
    peers = dict.fromkeys(c.name for row in rows for c in row.case.beside)
    yield Text()
    yield Text(f"{tier}: GB/s and CPU s/GiB; us, and 99 of 100", style="italic")
    table = new_table()
    for name in ("kvwire", "CPU", "p99", *peers):
        # Without its transport, which the line above has.
        table.add_column(name.partition(" ")[0], justify="right", no_wrap=True)
    for _, alike in groupby(rows, key=lambda row: row.case.work.nbytes):
        first = next(alike)
        table.add_row(size_of(store_work(first)))
        for row in (first, *alike):
            table.add_row(*_cells(row, list(peers)))
    yield table


def size_of(work: StoreWork) -> str:
    """Name what a work moves: blocks of a size, or hashes."""
    if work.verb == MATCH:
        return f"{work.count:,} hashes"
    return f"{size_name(work.nbytes)} a block"


def _cells(row: Row, peers: Sequence[str]) -> Iterator[str]:
    case = row.case
    samples = row.samples[case.ours.name]
    ours = Summary.of(samples.values)
    yield f"  {case.work.verb}, {case.unit.name}"
    yield _shown(case.unit, ours.median)
    yield "" if case.tail else f"{samples.cpu_s_per_gib:.2f}"
    yield _shown(case.unit, ours.p99) if case.tail else ""
    for name in peers:
        if name in row.samples:
            theirs = median(row.samples[name].values)
            yield f"{_shown(case.unit, theirs)} {_ratio(ours.median / theirs)}"
        else:
            yield "failed" if name in row.failures else ""


def _shown(unit: Unit, value: float) -> str:
    return f"{value * unit.scale:.{0 if unit.less_is_better else 2}f}"


def _ratio(ratio: float) -> str:
    """In four characters, of a hundredth as of a thousand."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def store_work(row: Row) -> StoreWork:
    """Return the work of a row, which is one of a store."""
    assert isinstance(row.case.work, StoreWork)
    return row.case.work
