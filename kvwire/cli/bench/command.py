"""The ``kvwire bench`` command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kvwire import UsageError
from kvwire.cli.bench import overlap_command
from kvwire.cli.bench.case import Benchmark, Case
from kvwire.cli.bench.document import as_text, document
from kvwire.cli.bench.messages import messages as benchmark_messages
from kvwire.cli.bench.plot import draw
from kvwire.cli.bench.table import render
from kvwire.cli.bench.turns import Finding, steps, take_turns
from kvwire.limits import MIB

Rounds = Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))]
# "-" is a file name here, and no option.
Output = Annotated[Path | None, Parameter(allow_leading_hyphen=True)]
Mebibytes = Annotated[int, Parameter(validator=Number(gte=1, lte=65_536))]

app = App(
    name="bench",
    help=(
        "Measure kvwire beside what you would otherwise use.\n\n"
        "In one run, in turns, in processes of their own; what counts is the ratio of "
        "the medians. Run it where nothing else runs."
    ),
)
app.command(overlap_command.command, name="overlap")


@app.command
def messages(
    *,
    transport: str = "tcp",
    loop: Literal["uvloop", "asyncio"] = "uvloop",
    rounds: Rounds = 10,
    round_mib: Mebibytes = 256,
    json: Output = None,
    plot: Path | None = None,
) -> None:
    """Round trips of 64 bytes; send, put and get of 1 MiB and 16 MiB.

    Beside a ping-pong over bare streams of the same loop, blocking sockets, and iperf3
    with one stream where it is installed (apt-get install iperf3).

    Args:
        transport: The transport of kvwire.
        loop: The event loop of kvwire and of the bare streams.
        rounds: How often everybody does their work; more rounds, firmer medians.
        round_mib: MiB that each contender of a rate moves in a round.
        json: Write every sample, and what ran where, to this file; - is the output.
        plot: Write a picture (SVG) to this file.
    """
    benchmark = benchmark_messages(
        transport=transport, loop=loop, round_bytes=round_mib * MIB
    )
    settings = {
        "transport": transport,
        "loop": loop,
        "rounds": rounds,
        "round_mib": round_mib,
    }
    findings = _measure(benchmark, rounds)
    _show(benchmark, findings, settings, json=json, plot=plot)


def _measure(benchmark: Benchmark, rounds: int) -> list[Finding[Case]]:
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
    )
    # Drawn between the rounds only: a thread that draws would be measured too.
    with Progress(
        *columns, console=Console(stderr=True), auto_refresh=False, transient=True
    ) as bar:
        task = bar.add_task("", total=steps(benchmark, rounds))

        def progress(step: str) -> None:
            bar.update(task, description=step)
            bar.refresh()
            bar.advance(task)

        return take_turns(benchmark, rounds, progress)


def _show(
    benchmark: Benchmark,
    findings: list[Finding[Case]],
    settings: dict[str, Any],
    *,
    json: Path | None,
    plot: Path | None,
) -> None:
    to_output = json == Path("-")
    # With the document on the output, the table is for whoever watches.
    Console(stderr=to_output, highlight=False).print(render(benchmark, findings))
    if json is not None:
        text = as_text(document(benchmark, findings, settings))
        if to_output:
            sys.stdout.write(text)
        else:
            _write(json, text)
    if plot is not None:
        _write(plot, draw(benchmark, findings))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from None
