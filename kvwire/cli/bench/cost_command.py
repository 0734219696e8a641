"""The ``kvwire bench cost`` command line."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from kvwire.cli.bench.cost import cost, document, render, steps
from kvwire.cli.bench.output import Output, Rounds, progress_bar, show
from kvwire.limits import MIB

Mebibytes = Annotated[int, Parameter(validator=Number(gte=1, lte=4096))]


def command(
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
        found = cost(transports, round_mib * MIB, rounds, progress)
    show(render(found), lambda: document(found, settings), None, json=json, plot=None)
    return int(any(result.failure for result in found))
