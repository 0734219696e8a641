"""The ``kvwire bench`` command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from kvwire.cli.bench import (
    fragments_command,
    many_command,
    ops_command,
    overlap_command,
    setup_command,
    store_command,
)
from kvwire.cli.bench.case import Others
from kvwire.cli.bench.messages import messages as benchmark_messages
from kvwire.cli.bench.output import Output, Rounds, run
from kvwire.cli.plot import Plot
from kvwire.limits import MIB

Mebibytes = Annotated[int, Parameter(validator=Number(gte=1, lte=65_536))]

app: App = App(
    name="bench",
    help=(
        "Measure kvwire beside what you would otherwise use.\n\n"
        "In one run, in turns, in processes of their own; what counts is the ratio of "
        "the medians. Run it where nothing else runs."
    ),
)
app.command(overlap_command.command, name="overlap")
app.command(fragments_command.command, name="fragments")
app.command(many_command.command, name="many")
app.command(ops_command.command, name="ops")
app.command(setup_command.command, name="setup")
app.command(store_command.command, name="store")


@app.command
def messages(
    *,
    transport: str = "tcp",
    loop: Literal["uvloop", "asyncio"] = "uvloop",
    rounds: Rounds = 10,
    round_mib: Mebibytes = 256,
    json: Output = None,
    plot: Plot = None,
    others: Annotated[Callable[[], Others], Parameter(parse=False)] = Others,
) -> None:
    """Round trips of 64 bytes; send, put and get of 1 MiB and 16 MiB.

    Beside a ping-pong over bare streams of the same loop, and blocking sockets.

    Args:
        transport: The transport of kvwire.
        loop: The event loop of kvwire and of the bare streams.
        rounds: How often everybody does their work; more rounds, firmer medians.
        round_mib: MiB that each contender of a rate moves in a round.
        json: Write every sample, and what ran where, to this file; - is the output.
        plot: Write a picture to this file: .svg, .png or .pdf. Needs matplotlib.
        others: Returns who stands beside kvwire as well; no option of the command.
    """
    benchmark = benchmark_messages(
        transport=transport,
        loop=loop,
        round_bytes=round_mib * MIB,
        others=others(),
    )
    settings = {
        "transport": transport,
        "loop": loop,
        "rounds": rounds,
        "round_mib": round_mib,
    }
    run(benchmark, settings, json=json, plot=plot)
