"""The ``kvwire bench overlap`` command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from kvwire import UsageError
from kvwire.cli.bench.document import as_text
from kvwire.cli.bench.overlap import LAYER_BYTES, LAYERS, Overlap, overlap, steps
from kvwire.cli.bench.overlap_pair import started
from kvwire.cli.bench.overlap_report import document, draw, render
from kvwire.limits import KIB

Rounds = Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))]
# "-" is a file name here, and no option.
Output = Annotated[Path | None, Parameter(allow_leading_hyphen=True)]
Kibibytes = Annotated[int, Parameter(validator=Number(gte=64, lte=1_048_576))]
Layers = Annotated[
    tuple[int, ...],
    Parameter(
        validator=Number(gte=2, lte=4096), consume_multiple=True, negative_iterable=()
    ),
]


def command(
    *,
    transport: str = "tcp",
    loop: Literal["uvloop", "asyncio"] = "uvloop",
    layers: Layers = LAYERS,
    layer_kib: Kibibytes = LAYER_BYTES // KIB,
    rounds: Rounds = 15,
    json: Output = None,
    plot: Path | None = None,
) -> None:
    """How much of a transfer hides behind the compute that makes its bytes.

    Compute is simulated by timers, since a GPU does not use the CPU. Exposed is the
    time from the last mark to the outcome: streamed layer by layer, and sent whole at
    the end, in turns. The efficiency is what was hidden of what any schedule could
    hide: all but the last layer, and no more than there is compute.

    Args:
        transport: The transport.
        loop: The event loop of both processes.
        layers: Layers of a request; a request for each number.
        layer_kib: KiB of one layer, in blocks of 64 KiB.
        rounds: How often everything is measured.
        json: Write every sample, and what ran where, to this file; - is the output.
        plot: Write a picture (SVG) to this file.
    """
    if transport == "inproc":
        raise UsageError(
            "--transport inproc joins two loops of one process, and this benchmark "
            "runs two processes; use --transport tcp"
        )
    if layer_kib % 64:
        raise UsageError(f"--layer-kib {layer_kib}: a multiple of 64, one block's KiB")
    found = _measure(transport, loop, layers, layer_kib * KIB, rounds)
    to_output = json == Path("-")
    # With the document on the output, the table is for whoever watches.
    Console(stderr=to_output, highlight=False).print(render(found))
    if json is not None:
        settings = {
            "transport": transport,
            "loop": loop,
            "layers": list(layers),
            "layer_kib": layer_kib,
            "rounds": rounds,
        }
        text = as_text(document(found, settings))
        if to_output:
            sys.stdout.write(text)
        else:
            _write(json, text)
    if plot is not None:
        _write(plot, draw(found))


def _measure(
    transport: str, loop: str, layers: tuple[int, ...], layer_bytes: int, rounds: int
) -> Overlap:
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
    )
    # Drawn between the rounds only: a thread that draws would be measured too.
    with (
        Progress(
            *columns, console=Console(stderr=True), auto_refresh=False, transient=True
        ) as bar,
        started(transport, loop) as pair,
    ):
        task = bar.add_task("", total=steps(layers, rounds))

        def progress(step: str) -> None:
            bar.update(task, description=step)
            bar.refresh()
            bar.advance(task)

        return overlap(pair, layers, layer_bytes, rounds, progress)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from None
