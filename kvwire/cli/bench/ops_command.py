"""The ``kvwire bench ops`` command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from cyclopts import Parameter

from kvwire.cli.bench.ops import Beside, document, ops, render
from kvwire.cli.bench.ops_counts import count
from kvwire.cli.bench.ops_work import operations
from kvwire.cli.bench.output import Output, Rounds, measure, show


def command(
    *,
    transport: str = "tcp",
    loop: Literal["uvloop", "asyncio"] = "uvloop",
    rounds: Rounds = 5,
    json: Output = None,
    others: Annotated[Callable[[], Beside] | None, Parameter(parse=False)] = None,
) -> None:
    """One operation: its time, the CPU of each side, its calls and its frames.

    Transfers, the first on a connection and the next; one layer of many; messages, put
    and get; a block into a store server and out of it.

    Args:
        transport: The transport of kvwire; of a store, what its server offers.
        loop: The event loop of both processes.
        rounds: How often everything is measured.
        json: Write every sample, and what ran where, to this file; - is the output.
        others: Returns who stands beside kvwire as well; no option of the command.
    """
    benchmark = ops(transport=transport, loop=loop, beside=others() if others else None)
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
