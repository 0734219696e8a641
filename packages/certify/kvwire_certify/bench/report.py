"""A benchmark's output: a table, a JSON document, and a progress bar."""

from __future__ import annotations

import json as jsons
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import kvwire
from kvwire_certify.bench.turns import Benchmark, CaseResult, Findings, compare

# The maximum width, also for a file or a pipe; a narrower screen keeps numbers whole.
WIDTH: Final = 80
# The load of each CPU, of one minute, below which others do not disturb what is timed.
_QUIET: Final = 0.25


def short(value: float) -> str:
    """Format a number with at least three digits, in four characters up to 9999."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def new_table(title: str | None, *columns: str) -> Table:
    """Make a table with one column for the row's name, and others for numbers."""
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("what", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def render(benchmark: Benchmark, findings: Findings) -> RenderableType:
    """Make a table for each group and placement, and lines below all of them."""
    parts: list[RenderableType] = []
    for both in dict.fromkeys((f.case.group, f.case.placement) for f in findings):
        rows = [f for f in findings if (f.case.group, f.case.placement) == both]
        rows = [row for row in rows if row.samples]
        title = " ".join(filter(None, ("kvwire bench", benchmark.name, both[0])))
        title = ", ".join(filter(None, (title, both[1])))
        for table in _tables(rows) if rows else ():
            parts += [Text(title), table, Text()]
    head = (
        "Medians; after a rate, both sides' CPU s/GiB; after a time, its p99 or the "
        "CPU us of each side."
    )
    return Group(*parts, Text(head), *_lines_below(benchmark, findings))


def _tables(rows: Findings) -> Iterator[Table]:
    """Yield tables, each with as many contenders side by side as fit."""
    names = list(dict.fromkeys(name for row in rows for name in row.samples))
    room = min(WIDTH, Console().width)
    endless = Console(width=sys.maxsize)
    while names:
        fit = len(names)
        while endless.measure(_table(rows, names[:fit])).maximum > room and fit > 1:
            fit -= 1
        yield _table(rows, names[:fit])
        names = names[fit:]


def _table(rows: Findings, names: Sequence[str]) -> Table:
    """Return a table that compares the first contender with the best of the rest."""
    found = [compare(row) for row in rows]
    judged = any(one.ratio is not None for one in found)
    table = new_table(None, *names, *["ratio"] * judged)
    for row, comparison in zip(rows, found, strict=True):
        ratio = comparison.ratio
        table.add_row(
            f"{row.case.name}, {row.case.unit.name}",
            *(_cell(row, name) for name in names),
            *["" if ratio is None else short(ratio)] * judged,
        )
    return table


def _cell(row: CaseResult, name: str) -> str:
    samples = row.samples.get(name)
    unit = row.case.unit
    if samples is None:
        return "failed" if name in row.failures else ""
    shown = short(samples.median * unit.scale)
    if not unit.is_time:
        return f"{shown} {short(samples.cpu_s_per_gib):>4}"
    if row.case.tail:
        return f"{shown} {short(samples.p99 * unit.scale)}"
    each = (1e6 * cpu_s / len(samples.rounds[0]) for cpu_s in samples.sides_cpu_s)
    return f"{shown} {'+'.join(f'{us:.0f}' for us in each)}"


def _lines_below(benchmark: Benchmark, findings: Findings) -> Iterator[Text]:
    """Yield notes, failures with their reasons, and missing contenders."""
    yield from map(Text, benchmark.notes)
    places: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        for name, reason in finding.failures.items():
            places.setdefault((name, reason), []).append(finding.case.name)
    for (name, reason), where in places.items():
        more = f" and {len(where) - 1} more" if len(where) > 1 else ""
        yield Text(f"{name} failed, {where[0]}{more}: {reason}")
    yield from (Text(str(absent)) for absent in benchmark.missing)


def load_note(load: float) -> str:
    """Return whether the machine was quiet when a benchmark began, in words."""
    cpus = os.cpu_count() or 1
    text = f"Load when it began: {load:.2f} on {cpus} CPUs"
    if load < cpus * _QUIET:
        return f"{text}, so quiet."
    return f"{text}, so others' work is in these figures; times are too long."


# --- the document ---------------------------------------------------------------------


def head(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the beginning of every document: the command and the machine."""
    return {
        "benchmark": name,
        "kvwire": kvwire.__version__,
        "settings": dict(settings),
        "machine": {
            "python": platform.python_version(),
            "implementation": platform.python_implementation(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
        },
    }


def document(
    benchmark: Benchmark, findings: Findings, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all measurements; times are in seconds, rates in bytes per second."""
    everybody = [one.name for case in benchmark.cases for one in case.contenders]
    facts: dict[str, dict[str, Any]] = {}
    for finding in findings:
        for name, found in finding.facts.items():
            facts.setdefault(name, {}).update(found)
    return {
        **head(benchmark.name, settings),
        "cases": [_row_of(finding) for finding in findings],
        "contenders": {name: facts.get(name, {}) for name in everybody},
        "missing": [asdict(absent) for absent in benchmark.missing],
        "notes": list(benchmark.notes),
    }


def _row_of(finding: CaseResult) -> dict[str, Any]:
    case = finding.case
    return {
        "name": case.name,
        "group": case.group,
        "placement": case.placement,
        "cpus": list(case.cpus),
        "work": asdict(case.work),
        "unit": "s" if case.unit.is_time else "B/s",
        **asdict(compare(finding)),
        "contenders": {n: s.document() for n, s in finding.samples.items()},
        "failures": finding.failures,
    }


# --- beside it ------------------------------------------------------------------------


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar; each call advances it and names the next step."""
    # Drawn only between rounds: a thread that draws would be measured too.
    with Progress(
        console=Console(stderr=True), auto_refresh=False, transient=True
    ) as bar:
        task = bar.add_task("", total=total)

        def progress(step: str) -> None:
            bar.update(task, description=step)
            bar.refresh()
            bar.advance(task)

        yield progress


def show(
    table: RenderableType, document: Callable[[], object], *, json: Path | None
) -> None:
    """Print a table, and write a document if a file is given; - is standard output."""
    to_output = json == Path("-")
    # If the document goes to standard output, the table goes to the terminal.
    Console(stderr=to_output, highlight=False).print(table)
    if json is None:
        return
    text = jsons.dumps(document(), indent=1) + "\n"
    if to_output:
        sys.stdout.write(text)
        return
    try:
        json.write_text(text)
    except OSError as exc:
        raise kvwire.UsageError(f"{json}: {exc.strerror}") from None
