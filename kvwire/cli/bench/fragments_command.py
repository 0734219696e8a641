"""The ``kvwire bench fragments`` command line."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from kvwire.cli.bench.fragments import (
    VERBS,
    FragmentsChoice,
    fragments,
    registered,
)
from kvwire.cli.bench.fragments_plot import draw
from kvwire.cli.bench.fragments_report import render
from kvwire.cli.bench.output import Output, Rounds, run
from kvwire.cli.plot import Plot
from kvwire.limits import KIB, MIB

SIZES_KIB = (4, 16, 64, 256, 1024, 16_384)
Kibibytes = Annotated[
    tuple[int, ...],
    Parameter(
        validator=Number(gte=4, lte=16_384), consume_multiple=True, negative_iterable=()
    ),
]
Mebibytes = Annotated[int, Parameter(validator=Number(gte=1, lte=4096))]


def command(  # noqa: PLR0913 - each is an option
    *,
    transport: str = "all",
    sizes_kib: Kibibytes = SIZES_KIB,
    verb: Literal["push", "pull", "both"] = "both",
    layout: Literal["per-layer", "cross-layer", "both"] = "both",
    loop: Literal["uvloop", "asyncio"] = "uvloop",
    rounds: Rounds = 5,
    round_mib: Mebibytes = 64,
    json: Output = None,
    plot: Plot = None,
) -> int:
    """Blocks of a paged cache, scattered on both sides: push and pull, 4 KiB to 16 MiB.

    Args:
        transport: Of kvwire, separated by commas, or all that are installed. One that
            cannot run here is named with the reason; local runs twice, with caches in
            ordinary memory and in arenas.
        sizes_kib: Sizes of one layer of one block.
        verb: Which side asks.
        layout: A tensor for each layer, or blocks across layers; the latter up to 64
            KiB a layer.
        loop: The event loop of kvwire.
        rounds: How often everybody does their work; more rounds, firmer medians.
        round_mib: MiB that each moves in a round.
        json: Write every sample, and what ran where, to this file; - is the output.
        plot: Write a picture to this file: .svg, .png or .pdf. Needs matplotlib.

    Returns:
        1 if a transport of kvwire that was asked for by name failed.
    """
    choice = FragmentsChoice(
        transports=registered() if transport == "all" else transport.split(","),
        layer_bytes=[kib * KIB for kib in sizes_kib],
        verbs=VERBS if verb == "both" else (verb,),
        layouts={"per-layer": (False,), "cross-layer": (True,)}.get(
            layout, (False, True)
        ),
        round_bytes=round_mib * MIB,
        loop=loop,
    )
    benchmark = fragments(choice)
    settings: dict[str, Any] = {
        "transport": list(choice.transports),
        "sizes_kib": list(sizes_kib),
        "loop": loop,
        "rounds": rounds,
        "round_mib": round_mib,
    }
    findings = run(benchmark, settings, json=json, plot=plot, render=render, draw=draw)
    failed = [name for f in findings for name in f.failures if name in benchmark.ours]
    failed += [absent.name for absent in benchmark.missing]
    return int(transport != "all" and bool(failed))
