"""``python -m tests.bench``: kvwire beside others' software, in one run."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from kvwire.cli.bench import command, store_command
from kvwire.cli.bench.fragments import VERBS, FragmentsChoice, registered
from kvwire.cli.bench.fragments_command import SIZES_KIB, Kibibytes
from kvwire.cli.bench.fragments_plot import draw
from kvwire.cli.bench.output import Output, Rounds, progress_bar, run, show
from kvwire.cli.main import main
from kvwire.cli.plot import Plot
from kvwire.limits import KIB, MIB
from tests.bench import iperf3, store
from tests.bench.cost import cost as cost_of
from tests.bench.cost import document as cost_document
from tests.bench.cost import render as render_cost
from tests.bench.cost import steps
from tests.bench.fragments import ALL_PEERS, Peers, beside, document, render
from tests.bench.peer import PEERS, interpreters

Mebibytes = Annotated[int, Parameter(validator=Number(gte=1, lte=4096))]
Pythons = Annotated[
    tuple[Path, ...],
    Parameter(consume_multiple=True, negative_iterable=(), env_var="BENCH_PEER_PYTHON"),
]

app = App(name="python -m tests.bench", help=__doc__)


def _with(run: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    """A command with arguments that are no options."""

    @functools.wraps(run)
    def command_with(**options: Any) -> Any:
        return run(**options, **given)

    return command_with


app.command(_with(command.messages, others=iperf3.installed), name="messages")
app.command(_with(store_command.command, beside=store.beside), name="store")


@app.command
def fragments(
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
) -> None:
    """``kvwire bench fragments`` beside other libraries; see there for its options.

    Args:
        transport: Of kvwire, separated by commas, or all that are installed.
        peers: Of nixl, mooncake, ucxx and iperf3, separated by commas; or all, or none.
            One that is not installed is named with how to install it.
        peer_python: Interpreters in which the peers are looked for, before this one.
        sizes_kib: Sizes of one layer of one block.
        verb: Which side asks.
        layout: A tensor for each layer, or blocks across layers.
        loop: The event loop of kvwire.
        rounds: How often everybody does their work.
        round_mib: MiB that each moves in a round.
        json: Write every sample to this file; - is the output.
        plot: Write a picture to this file.
    """
    names = {"all": ALL_PEERS, "none": ()}.get(peers, tuple(peers.split(",")))
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
    benchmark = beside(choice, Peers(names, interpreters(peer_python)))
    settings = {
        "transport": list(choice.transports),
        "peers": list(names),
        "sizes_kib": list(sizes_kib),
        "loop": loop,
        "rounds": rounds,
        "round_mib": round_mib,
    }
    run(
        benchmark,
        settings,
        json=json,
        plot=plot,
        render=render,
        document=document,
        draw=draw,
    )


@app.command
def cost(
    *,
    transport: str = "tcp",
    rounds: Rounds = 3,
    round_mib: Mebibytes = 64,
    json: Output = None,
) -> int:
    """Memory of connections and transfers, CPU of both sides, stalls of the loop.

    Args:
        transport: Of kvwire, separated by commas; those that join two processes.
        rounds: How often everything is measured, in new processes each time.
        round_mib: MiB of a transfer; it goes in fragments of 4 KiB.
        json: Write every answer, and what ran where, to this file; - is the output.

    Returns:
        1 if a transport failed.
    """
    transports = transport.split(",")
    settings = {"transport": transports, "rounds": rounds, "round_mib": round_mib}
    with progress_bar(steps(transports, rounds)) as progress:
        found = cost_of(transports, round_mib * MIB, rounds, progress)
    shown = render_cost(found)
    show(shown, lambda: cost_document(found, settings), None, json=json, plot=None)
    return int(any(result.failure for result in found))


@app.command
def install() -> None:
    """How to install the peers."""
    for peer in PEERS.values():
        print(f"{peer.name}: {peer.install}")
    print(f"iperf3: {iperf3.INSTALL}")


if __name__ == "__main__":
    sys.exit(main(command=app))
