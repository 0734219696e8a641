"""What the commands have alike: their options, the progress bar, where findings go."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kvwire import UsageError
from kvwire.cli.bench.case import Benchmark
from kvwire.cli.bench.document import as_text, document
from kvwire.cli.bench.plot import draw
from kvwire.cli.bench.table import render
from kvwire.cli.bench.turns import CaseResult, steps, take_turns
from kvwire.cli.plot import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rounds = Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))]
# "-" is a file name here, and no option.
Output = Annotated[Path | None, Parameter(allow_leading_hyphen=True)]


def measure(plan: Benchmark, rounds: int) -> list[CaseResult]:
    """Let everybody take turns, with a bar that shows how far they are.

    Raises:
        BenchError: As for :func:`~kvwire.cli.bench.turns.take_turns`.
    """
    with progress_bar(steps(plan, rounds)) as progress:
        return take_turns(plan, rounds, progress)


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar that moves on with each call, which says what is done next."""
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
    )
    # Drawn between the rounds only: a thread that draws would be measured too.
    with Progress(
        *columns, console=Console(stderr=True), auto_refresh=False, transient=True
    ) as bar:
        task = bar.add_task("", total=total)

        def progress(step: str) -> None:
            bar.update(task, description=step)
            bar.refresh()
            bar.advance(task)

        yield progress


def run(
    benchmark: Benchmark,
    settings: dict[str, Any],
    *,
    json: Path | None,
    plot: Path | None = None,
    render: Callable[[Benchmark, list[CaseResult]], RenderableType] = render,
    document: Callable[
        [Benchmark, list[CaseResult], dict[str, Any]], dict[str, Any]
    ] = document,
    draw: Callable[[Benchmark, list[CaseResult]], Mapping[str, Figure]] = draw,
) -> list[CaseResult]:
    """Measure a benchmark and show what was found.

    Args:
        benchmark: What to run.
        settings: How the command was called; ``rounds`` is how often.
        json: Where the document goes; - is the output.
        plot: Where the pictures go.
        render: Makes the table.
        document: Makes the document.
        draw: Makes the pictures.

    Raises:
        BenchError: It cannot be run.
    """
    findings = measure(benchmark, settings["rounds"])
    show(
        render(benchmark, findings),
        lambda: document(benchmark, findings, settings),
        lambda: draw(benchmark, findings),
        json=json,
        plot=plot,
    )
    return findings


def show(
    table: RenderableType,
    document: Callable[[], dict[str, Any]],
    pictures: Callable[[], Mapping[str, Figure]] | None,
    *,
    json: Path | None,
    plot: Path | None,
) -> None:
    """Print the table, and write the document and the pictures where they are wanted.

    Args:
        table: What is printed.
        document: Makes the document.
        pictures: Makes the pictures, by what is added to the name of ``plot``.
        json: Where the document goes; - is the output.
        plot: Where the pictures go.

    Raises:
        UsageError: A file cannot be written.
    """
    to_output = json == Path("-")
    # With the document on the output, the table is for whoever watches.
    Console(stderr=to_output, highlight=False).print(table)
    if json is not None:
        text = as_text(document())
        if to_output:
            sys.stdout.write(text)
        else:
            _write(json, text)
    if plot is not None and pictures is not None:
        for added, figure in pictures().items():
            save(figure, plot.with_stem(plot.stem + added))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from None
