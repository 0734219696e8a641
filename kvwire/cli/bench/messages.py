"""``kvwire bench messages``: a round trip, and messages, puts and gets at full rate."""

from __future__ import annotations

from typing import Final

from kvwire.cli.bench.bare import SocketsSide, StreamsSide
from kvwire.cli.bench.operations import GET, PUT, ROUND_TRIP, SEND, OpsWork
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.peer import contender
from kvwire.cli.bench.report import (
    COMMON,
    Common,
    Mebibytes,
    Rounds,
    require_known,
)
from kvwire.cli.bench.turns import GIGABYTES_PER_SECOND, MICROSECONDS, Benchmark, Case
from kvwire.limits import MIB
from kvwire.types import in_bytes

PING_BYTES: Final = 64
PINGS: Final = 500
SIZES: Final = (1 * MIB, 16 * MIB)
# Enough that the wire is never idle while one operation ends and the next begins.
IN_FLIGHT: Final = 4


def command(
    *,
    transport: str = "tcp",
    peer: str = "",
    round_mib: Mebibytes = 256,
    rounds: Rounds = 10,
    common: Common = COMMON,
) -> int:
    """Measure round trips of 64 bytes; send, put and get of 1 MiB and 16 MiB.

    Beside a ping-pong over bare streams of the same loop, and blocking sockets.

    Args:
        transport: The transport of kvwire.
        peer: Measure kvwire alone, with the host that runs `kvwire bench serve` at this
            address.
        round_mib: MiB that each contender of a rate moves in a round.
        rounds: How often everybody does their work; more rounds, firmer medians.
        common: Options of every benchmark.
    """
    require_known([transport])
    options = {"transport": transport, "loop": common.loop, "by_link": 1}
    ours = contender("kvwire", peer, **options)
    streams = Contender(f"{common.loop} streams", StreamsSide, options=options)
    sockets = Contender("bare sockets", SocketsSide)
    ping = Case(
        name=f"{PING_BYTES} B {ROUND_TRIP}",
        work=OpsWork(verb=ROUND_TRIP, nbytes=PING_BYTES, count=PINGS),
        unit=MICROSECONDS,
        ours=[ours],
        beside=[] if peer else [streams],
        tail=True,
        group=peer and f"to {peer}",
    )
    rates = [
        Case(
            name=f"{in_bytes(nbytes)} {verb}",
            work=OpsWork(
                verb=verb,
                nbytes=nbytes,
                count=max(IN_FLIGHT, round_mib * MIB // nbytes),
                in_flight=IN_FLIGHT,
            ),
            unit=GIGABYTES_PER_SECOND,
            ours=[ours],
            beside=[] if peer else [sockets],
            group=peer and f"to {peer}",
        )
        for nbytes in SIZES
        for verb in (SEND, PUT, GET)
    ]
    benchmark = Benchmark(
        name="messages",
        cases=[ping, *rates],
        notes=[f"{IN_FLIGHT} operations in flight. Only kvwire checks what it moves."],
    )
    settings = {"transport": transport, "rounds": rounds, "round_mib": round_mib}
    return common.run(benchmark, peer=peer, **settings)
