"""What ``kvwire bench fragments`` found: as tables of at most 80 columns, as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, Final

from rich.box import MINIMAL
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import kvwire
from kvwire.cli.bench.case import GIGABYTES_PER_SECOND, Samples
from kvwire.cli.bench.document import machine, samples_of
from kvwire.cli.bench.fragments import TCP, VERBS, WIRES, Fragments, Row, size_name
from kvwire.cli.bench.table import WIDTH, new_table, short
from kvwire.cli.bench.turns import Finding

Findings = Sequence[Finding[Row]]

# A rate, the CPU it took, and a line before them: "12.3 0.45".
_CELL: Final = 9
_DISPLAYED: Final = {False: "a tensor for each layer", True: "blocks across layers"}


def render(benchmark: Fragments, findings: Findings) -> RenderableType:
    """Rates by wire and verb, the layouts side by side, and who failed."""
    parts: list[RenderableType] = []
    for wire in WIRES:
        for verb in VERBS:
            for cross_layer in (False, True):
                rows = [
                    f
                    for f in findings
                    if (f.case.wire, f.case.work.verb) == (wire, verb)
                    and f.case.work.cross_layer is cross_layer
                    and f.samples
                ]
                if rows:
                    parts += _rates(benchmark, rows)
    if {f.case.work.cross_layer for f in findings if f.samples} == {False, True}:
        parts += _layouts(findings)
    parts += [Text(line) for line in _lines(benchmark, findings)]
    return Group(*parts)


def document(
    benchmark: Fragments, findings: Findings, settings: dict[str, Any]
) -> dict[str, Any]:
    """The JSON document; rates are bytes a second."""
    return {
        "benchmark": "fragments",
        "kvwire": kvwire.__version__,
        "settings": settings,
        "machine": machine(),
        "cases": [
            {
                "name": finding.case.name,
                "wire": finding.case.wire,
                "work": asdict(finding.case.work),
                "layout": finding.case.work.layout,
                "layer_bytes": finding.case.work.layer_bytes,
                "contenders": {
                    name: samples_of(samples)
                    for name, samples in finding.samples.items()
                },
                "failures": finding.failures,
            }
            for finding in findings
        ],
        "contenders": {c.name: dict(c.facts()) for c in benchmark.contenders},
        "missing": [asdict(absent) for absent in benchmark.missing],
        "notes": list(_notes(benchmark)),
    }


def _rates(benchmark: Fragments, rows: Findings) -> Iterator[RenderableType]:
    """A column for each size; below the line, kvwire beside the best of the others.

    Who has failed at every size has no row; the lines below all tables say why.
    """
    first = rows[0].case
    how = _DISPLAYED[first.work.cross_layer]
    over = "over TCP" if first.wire == TCP else "on one host"
    yield Text(f"{first.work.verb} {over}, {how}: GB/s, CPU s/GiB", style="italic")
    names = [c.name for c in first.contenders if any(c.name in r.samples for r in rows)]
    count = max(1, (WIDTH - max(map(len, names))) // (_CELL + 1))
    for begin in range(0, len(rows), count):
        yield _rates_table(benchmark, rows[begin : begin + count], names)
    yield Text()


def _rates_table(benchmark: Fragments, rows: Findings, names: Sequence[str]) -> Table:
    table = new_table(box=MINIMAL)
    for row in rows:
        size = size_name(row.case.work.layer_bytes)
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


def _ratio(benchmark: Fragments, row: Finding[Row], name: str) -> str:
    medians = {
        other: median(row.samples[other].values)
        for other in row.samples
        if other not in benchmark.ours
    }
    if not medians or name not in row.samples:
        return ""
    return f"{short(median(row.samples[name].values) / max(medians.values()))}x    "


def _layouts(findings: Findings) -> Iterator[RenderableType]:
    """The smallest size in both layouts, for everybody to whom they differ."""
    wide = [f for f in findings if f.case.work.cross_layer and f.samples]
    smallest = min(f.case.work.layer_bytes for f in wide)
    layers = wide[0].case.work.layers
    found = {
        (name, f.case.work.verb, f.case.work.cross_layer): samples
        for f in findings
        for name, samples in f.samples.items()
        if f.case.work.layer_bytes == smallest
    }
    yield Text(
        f"{size_name(smallest)} a layer, {layers} layers, GB/s: a tensor for each "
        "layer, blocks across layers; CPU: how many times less of it",
        style="italic",
    )
    table = new_table()
    for verb in VERBS:
        for name in (verb, "across", "ratio", "CPU"):
            table.add_column(name, justify="right", no_wrap=True)
    for name in dict.fromkeys(name for f in wide for name in f.samples):
        cells: list[str] = []
        for verb in VERBS:
            cells += _both_layouts(
                *(found.get((name, verb, across)) for across in (False, True))
            )
        table.add_row(name, *cells)
    yield table
    yield Text()


def _both_layouts(layered: Samples | None, across: Samples | None) -> list[str]:
    shown = ["" if s is None else _gigabytes(s) for s in (layered, across)]
    if layered is None or across is None:
        return [*shown, "", ""]
    ratio = median(across.values) / median(layered.values)
    cpu_ratio = layered.cpu_s_per_gib / across.cpu_s_per_gib
    return [*shown, short(ratio), short(cpu_ratio)]


def _lines(benchmark: Fragments, findings: Findings) -> Iterator[str]:
    yield from _notes(benchmark)
    reasons: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        for name, reason in finding.failures.items():
            reasons.setdefault((name, reason), []).append(finding.case.name)
    for (name, reason), where in reasons.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        yield f"{name} failed, {where[0]}{more}: {reason}"
    yield from map(str, benchmark.missing)


def _notes(benchmark: Fragments) -> Iterator[str]:
    yield "CPU seconds are of both sides. Of these only kvwire checks what it moves."
    yield from filter(None, (contender.note for contender in benchmark.contenders))
