"""``kvwire bench setup``: from nothing to a connection, and to the first transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvwire.cli.bench.case import MICROSECONDS, Benchmark, Case, Work
from kvwire.cli.bench.fragments import require_known
from kvwire.cli.bench.pair import PairContender
from kvwire.cli.bench.sides.setup_half import COLUMNS, TRANSFER_BYTES
from kvwire.limits import KIB

# What a round makes of each.
CONNECTIONS: Final = 20


def setup(*, transports: Sequence[str], loop: str) -> Benchmark:
    """The benchmark.

    Raises:
        UsageError: A transport that nobody knows.
    """
    require_known(transports, processes=True)
    streams = PairContender(f"{loop} streams", "setup-streams", [f"loop={loop}"])
    pairs = [
        PairContender(f"kvwire {name}", "setup", [f"transport={name}", f"loop={loop}"])
        for name in transports
    ]
    return Benchmark(
        name="setup",
        cases=[
            Case(
                name=f"{name} {column}",
                work=Work(verb=column, nbytes=TRANSFER_BYTES, count=CONNECTIONS),
                unit=MICROSECONDS,
                ours=pair,
                beside=[streams],
                target=None,
                tail=True,
            )
            for column in COLUMNS
            for name, pair in zip(transports, pairs, strict=True)
        ],
        notes=[
            f"A transfer is a pull of one block, {TRANSFER_BYTES // KIB} KiB.",
            "The streams connect and send as many bytes, and nothing else.",
        ],
    )
