"""The ``kvwire bench many`` command line."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from kvwire.cli.bench.many import document, many, render
from kvwire.cli.bench.output import Output, Rounds, run
from kvwire.limits import MIB

Endpoints = Annotated[int, Parameter(validator=Number(gte=1, lte=32))]
Transfers = Annotated[int, Parameter(validator=Number(gte=10, lte=100_000))]
Others = Annotated[int, Parameter(validator=Number(gte=1, lte=64))]
Mebibytes = Annotated[int, Parameter(validator=Number(gte=1, lte=4096))]


def command(  # noqa: PLR0913 - each is an option
    *,
    transport: str = "tcp",
    loop: Literal["uvloop", "asyncio"] = "uvloop",
    endpoints: Endpoints = 16,
    transfers: Transfers = 1000,
    large_mib: Mebibytes = 4,
    others: Others = 8,
    other_mib: Mebibytes = 16,
    rounds: Rounds = 3,
    json: Output = None,
) -> int:
    """Many transfers at once over many connections, and a small one beside large ones.

    Everything travels in fragments of 4 KiB. With --other-mib 1024, the side that pulls
    has 8 GiB of memory, and the one that publishes 1 GiB, which all the others want.

    Args:
        transport: Of kvwire, separated by commas; those that join two processes.
        loop: The event loop of both processes.
        endpoints: Communicators on each side; each is connected to each.
        transfers: How many begin at once: 80 of 100 have 64 KiB, 18 have 1 MiB.
        large_mib: MiB of the other two of 100.
        others: How many are always under way beside the one that is timed.
        other_mib: MiB of each of them.
        rounds: How often everything is measured; percentiles are of all rounds.
        json: Write every sample, and what ran where, to this file; - is the output.

    Returns:
        1 if a transport failed.
    """
    benchmark = many(
        transports=transport.split(","),
        loop=loop,
        endpoints=endpoints,
        transfers=transfers,
        others=others,
        other_bytes=other_mib * MIB,
        large_bytes=large_mib * MIB,
    )
    settings = {
        "transport": transport.split(","),
        "loop": loop,
        "endpoints": endpoints,
        "transfers": transfers,
        "large_mib": large_mib,
        "others": others,
        "other_mib": other_mib,
        "rounds": rounds,
    }
    findings = run(benchmark, settings, json=json, render=render, document=document)
    return int(any(finding.failures for finding in findings))
