"""``kvwire bench messages``: a round trip, and messages, puts and gets at full rate."""

from __future__ import annotations

from typing import Final

from kvwire.cli.bench.case import (
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    Benchmark,
    Case,
    Contender,
    Others,
    Work,
)
from kvwire.cli.bench.fragments import require_known
from kvwire.cli.bench.pair import PairContender
from kvwire.limits import MIB

PING_BYTES: Final = 64
PINGS: Final = 500
SIZES: Final = (1 * MIB, 16 * MIB)
# Enough that the wire is never idle while one operation ends and the next begins.
IN_FLIGHT: Final = 4
# A round trip through all of kvwire, beside one that does nothing.
PING_TARGET: Final = 1.3
# One stream of kvwire, beside the best that one stream does.
RATE_TARGET: Final = 0.9


def messages(
    *, transport: str, loop: str, round_bytes: int, others: Others | None = None
) -> Benchmark:
    """The benchmark.

    Args:
        transport: Of kvwire.
        loop: The event loop of kvwire and of the bare streams.
        round_bytes: Moved by each contender of a rate in each round.
        others: Those who stand beside kvwire as well.

    Raises:
        UsageError: The transport does not join two processes.
    """
    require_known([transport], processes=True)
    ours = PairContender("kvwire", "kvwire", [f"transport={transport}", f"loop={loop}"])
    streams = PairContender(f"{loop} streams", "streams", [f"loop={loop}"])
    others = others or Others()
    beside: list[Contender] = [PairContender("bare sockets", "sockets")]
    beside += others.movers.get("messages", ())
    ping = Work(verb="round trip", nbytes=PING_BYTES, count=PINGS)
    rates = [
        Work(
            verb=verb,
            nbytes=nbytes,
            count=max(IN_FLIGHT, round_bytes // nbytes),
            in_flight=IN_FLIGHT,
        )
        for nbytes in SIZES
        for verb in ("send", "put", "get")
    ]
    return Benchmark(
        name="messages",
        cases=[
            Case(
                name=f"{PING_BYTES} B round trip",
                work=ping,
                unit=MICROSECONDS,
                ours=ours,
                beside=[streams],
                target=PING_TARGET,
                tail=True,
            ),
            *(
                Case(
                    name=f"{work.nbytes // MIB} MiB {work.verb}",
                    work=work,
                    unit=GIGABYTES_PER_SECOND,
                    ours=ours,
                    beside=beside,
                    target=RATE_TARGET,
                )
                for work in rates
            ),
        ],
        missing=others.missing,
        notes=[f"{IN_FLIGHT} operations in flight. Only kvwire checks what it moves."],
    )
