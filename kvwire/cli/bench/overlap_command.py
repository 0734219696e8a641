"""The ``kvwire bench overlap`` command line."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from kvwire import UsageError
from kvwire.cli.bench.fragments import require_known
from kvwire.cli.bench.output import Output, Rounds, progress_bar, show
from kvwire.cli.bench.overlap import LAYER_BYTES, LAYERS, overlap, steps
from kvwire.cli.bench.overlap_pair import started
from kvwire.cli.bench.overlap_report import document, draw, render
from kvwire.cli.plot import Plot
from kvwire.limits import KIB

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
    plot: Plot = None,
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
        plot: Write a picture to this file: .svg, .png or .pdf. Needs matplotlib.
    """
    require_known([transport], processes=True)
    if layer_kib % 64:
        raise UsageError(f"--layer-kib {layer_kib}: a multiple of 64, one block's KiB")
    with (
        progress_bar(steps(layers, rounds)) as progress,
        started(transport, loop) as pair,
    ):
        found = overlap(pair, layers, layer_kib * KIB, rounds, progress)
    settings = {
        "transport": transport,
        "loop": loop,
        "layers": list(layers),
        "layer_kib": layer_kib,
        "rounds": rounds,
    }
    show(
        render(found),
        lambda: document(found, settings),
        lambda: draw(found),
        json=json,
        plot=plot,
    )
