"""The ``kvwire bench ops`` command line."""

from __future__ import annotations

from typing import Literal

from kvwire.cli.bench.ops import document, ops, render
from kvwire.cli.bench.ops_counts import count
from kvwire.cli.bench.ops_work import operations
from kvwire.cli.bench.output import Output, Rounds, measure, show


def command(
    *,
    transport: str = "tcp",
    loop: Literal["uvloop", "asyncio"] = "uvloop",
    rounds: Rounds = 5,
    json: Output = None,
) -> None:
    """One operation: its time, the CPU of each side, its calls and its frames.

    Transfers, the first on a connection and the next; one layer of many; messages, put
    and get; a block into a store server and out of it.

    Args:
        transport: The transport of kvwire; of a store, what its server offers.
        loop: The event loop of both processes.
        rounds: How often everything is measured.
        json: Write every sample, and what ran where, to this file; - is the output.
    """
    benchmark = ops(transport=transport, loop=loop)
    settings = {"transport": transport, "loop": loop, "rounds": rounds}
    findings = measure(benchmark, rounds)
    counted = count(operations(), transport)
    show(
        render(benchmark, findings, counted),
        lambda: document(benchmark, findings, counted, settings),
        None,
        json=json,
        plot=None,
    )
