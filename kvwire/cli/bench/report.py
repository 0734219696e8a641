"""A benchmark's output: a table, a JSON document, and a progress bar."""

from __future__ import annotations

import json as jsons
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import kvwire
from kvwire.backend import registry
from kvwire.cli.bench.turns import (
    Benchmark,
    CaseResult,
    Findings,
    compare,
    steps,
    take_turns,
)


def within(low: int, high: int, *, consume_multiple: bool = False) -> Parameter:
    """Return an option's parameter: a number from ``low`` to ``high``."""
    limits = Number(gte=low, lte=high)
    return Parameter(validator=limits, consume_multiple=consume_multiple)


Loop = Literal["uvloop", "asyncio"]
Rounds = Annotated[int, within(1, 10_000)]
Mebibytes = Annotated[int, within(1, 4096)]
# "-" is a file name here, not an option.
Output = Annotated[Path | None, Parameter(allow_leading_hyphen=True)]

# The maximum width, also for a file or a pipe; a narrower screen keeps numbers whole.
WIDTH: Final = 80


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Options that every benchmark has.

    Attributes:
        loop: The event loop of kvwire, and of bare streams beside it.
        json: Write every sample, with versions, settings and load, to this file; -
            means standard output.
        beside: Adds other contenders; not a command-line option.
    """

    loop: Loop = "uvloop"
    json: Output = None
    beside: Annotated[Callable[[Benchmark], Benchmark], Parameter(parse=False)] = (
        lambda benchmark: benchmark
    )

    def run(self, benchmark: Benchmark, **settings: Any) -> int:
        """Measure a benchmark and show the results; return 1 if kvwire failed.

        The JSON document contains the command's arguments as settings; ``rounds`` is
        one of them.
        """
        benchmark = self.beside(benchmark)
        rounds = settings["rounds"]
        with progress_bar(steps(benchmark, rounds)) as progress:
            measured = take_turns(benchmark, rounds, progress)
        found = [row for one in measured for row in benchmark.split(one)]
        show(
            Group(
                render(benchmark, found),
                *lines_below(benchmark, found),
                *benchmark.below(found),
            ),
            lambda: document(benchmark, found, {**settings, "loop": self.loop}),
            json=self.json,
        )
        ours = ((row, one.name) for row in found for one in row.case.ours)
        return int(any(name in row.failures for row, name in ours))


COMMON: Final = Common()


def short(value: float) -> str:
    """Format a number with at least three digits, in four characters up to 9999."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def between_processes() -> list[str]:
    """Return the transports that join two processes."""
    return [name for name in registry.names() if name != "inproc"]


def require_known(transports: list[str]) -> list[str]:
    """Raise if a transport is not installed, or does not join two processes."""
    known = between_processes()
    for name in transports:
        if name not in known:
            why = "joins two loops of one process, and this benchmark runs two"
            raise kvwire.UsageError(
                f"--transport {name}: "
                f"{why if name == 'inproc' else 'no such backend is installed'}; "
                f"choose one of {', '.join(known)}"
            )
    return transports


def require_able(transports: list[str]) -> list[str]:
    """Raise if a transport is unknown, or cannot run here."""
    for name in require_known(transports):
        if why := why_unable(name):
            raise kvwire.BackendUnavailable(f"--transport {name}: {why}")
    return transports


def why_unable(transport: str) -> str:
    """Return why an installed backend cannot run here; "" if it can."""
    found = registry.availability(transport)
    why = "; ".join(filter(None, (found.reason, found.remedy)))
    return "" if found.available else why or "it cannot run here"


# --- the table ------------------------------------------------------------------------


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
    """Make a table for each group, or several tables if one is too wide."""
    parts: list[RenderableType] = []
    for group in dict.fromkeys(f.case.group for f in findings):
        rows = [f for f in findings if f.case.group == group and f.samples]
        title = " ".join(filter(None, ("kvwire bench", benchmark.name, group)))
        for table in _tables(rows) if rows else ():
            parts += [Text(title), table, Text()]
    head = "Medians; after a rate, both sides' CPU s/GiB; after a time, its p99."
    return Group(*parts, Text(head))


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
    return f"{shown} {short(samples.p99 * unit.scale)}" if row.case.tail else shown


def lines_below(benchmark: Benchmark, findings: Findings) -> Iterator[Text]:
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
        "cases": [row_of(finding) for finding in findings],
        "contenders": {name: facts.get(name, {}) for name in everybody},
        "missing": [asdict(absent) for absent in benchmark.missing],
        "notes": list(benchmark.notes),
        **benchmark.more(findings),
    }


def row_of(finding: CaseResult) -> dict[str, Any]:
    """Return all measurements of a case."""
    case = finding.case
    return {
        "name": case.name,
        "group": case.group,
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
