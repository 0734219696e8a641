"""The ``kvwire bench setup`` command line."""

from __future__ import annotations

from typing import Literal

from kvwire.cli.bench.output import Output, Rounds, run
from kvwire.cli.bench.setup import setup
from kvwire.cli.plot import Plot


def command(
    *,
    transport: str = "tcp",
    loop: Literal["uvloop", "asyncio"] = "uvloop",
    rounds: Rounds = 5,
    json: Output = None,
    plot: Plot = None,
) -> None:
    """The handshake of a connection, its first transfer and its second.

    Args:
        transport: Of kvwire, separated by commas; those that join two processes.
        loop: The event loop of kvwire and of the bare streams beside it.
        rounds: How often 20 connections are made by everybody.
        json: Write every sample, and what ran where, to this file; - is the output.
        plot: Write a picture to this file: .svg, .png or .pdf. Needs matplotlib.
    """
    transports = transport.split(",")
    benchmark = setup(transports=transports, loop=loop)
    settings = {"transport": transports, "loop": loop, "rounds": rounds}
    run(benchmark, settings, json=json, plot=plot)
