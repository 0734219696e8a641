"""The ``kvwire bench fragments`` command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from kvwire.cli.bench import iperf3
from kvwire.cli.bench.fragments import (
    ALL_PEERS,
    VERBS,
    Choice,
    fragments,
    registered,
)
from kvwire.cli.bench.fragments_plot import draw
from kvwire.cli.bench.fragments_report import document, render
from kvwire.cli.bench.output import Output, Rounds, measure, show
from kvwire.cli.bench.peer import PEERS, interpreters
from kvwire.cli.bench.solo import NO_UCX_PERFTEST
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
Pythons = Annotated[
    tuple[Path, ...],
    Parameter(consume_multiple=True, negative_iterable=(), env_var="BENCH_PEER_PYTHON"),
]


def command(  # noqa: PLR0913 - each is an option
    *,
    transport: str = "all",
    peers: str = "all",
    peer_python: Pythons = (),
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
        peers: Of nixl, mooncake, gloo, ucxx, iperf3, ucx_perftest and memcpy, separated
            by commas; or all, or none. They do the same work in the same run; one that
            is not installed is named with how to install it.
        peer_python: Interpreters in which the peers are looked for, before this one.
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
    choice = Choice(
        transports=registered() if transport == "all" else transport.split(","),
        peers=_peers(peers),
        interpreters=interpreters(peer_python),
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
        "peers": list(choice.peers),
        "sizes_kib": list(sizes_kib),
        "loop": loop,
        "rounds": rounds,
        "round_mib": round_mib,
    }
    findings = measure(benchmark, rounds)
    show(
        render(benchmark, findings),
        lambda: document(benchmark, findings, settings),
        lambda: draw(benchmark, findings),
        json=json,
        plot=plot,
    )
    failed = [name for f in findings for name in f.failures if name in benchmark.ours]
    failed += [m.name for m in benchmark.missing if m.name not in choice.peers]
    return int(transport != "all" and bool(failed))


def how_to_install() -> str:
    """How to get each peer; the end of the help."""
    lines = [
        *(f"{peer.name}: {peer.install}" for peer in PEERS.values()),
        f"iperf3: {iperf3.INSTALL}",
        f"{NO_UCX_PERFTEST.name}: {NO_UCX_PERFTEST.remedy}",
        "memcpy: nothing; it is NumPy's",
    ]
    return "How to install the peers:\n\n" + "\n\n".join(lines)


def _peers(said: str) -> Sequence[str]:
    return {"all": ALL_PEERS, "none": ()}.get(said, tuple(said.split(",")))
