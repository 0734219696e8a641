"""``kvwire bench messages``: a round trip, and messages, puts and gets at full rate."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import kvwire
from kvwire.cli.bench.bare import CONNECT, SocketsSide, StreamsSide
from kvwire.cli.bench.pair import Contender, Work
from kvwire.cli.bench.report import (
    COMMON,
    Common,
    Mebibytes,
    Rounds,
    require_known,
    size_name,
)
from kvwire.cli.bench.side import ConnectedSide, digest, fill
from kvwire.cli.bench.turns import GIGABYTES_PER_SECOND, MICROSECONDS, Benchmark, Case
from kvwire.limits import MIB

ROUND_TRIP: Final = "round trip"
SEND: Final = "send"
PUT: Final = "put"
GET: Final = "get"
PING_BYTES: Final = 64
PINGS: Final = 500
CONNECTIONS: Final = 20
SIZES: Final = (1 * MIB, 16 * MIB)
# Enough that the wire is never idle while one operation ends and the next begins.
IN_FLIGHT: Final = 4
# A round trip through all of kvwire, beside one that does nothing.
PING_TARGET: Final = 1.3
# One stream of kvwire, beside the best that one stream does.
RATE_TARGET: Final = 0.9

_GO: Final = 1
_DONE: Final = 2
_DATA: Final = 3
_BACK: Final = 4


class MessagesSide(ConnectedSide[Work]):
    """The left side does the operations of a work, the right one is the other end."""

    _grants: list[kvwire.Grant]

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._shape: tuple[str, int] = ("", 0)
        self._memory = np.zeros(0, np.uint8)
        # Memory of each operation in flight.
        self._parts: list[npt.NDArray[np.uint8]] = []

    async def prepare(self, work: Work) -> str:
        """Right: memory, and a grant for it where the left side asks for that."""
        self._have(work)
        if work.verb not in (PUT, GET):
            return ""
        region = self.communicator.register(self._memory, access="readwrite")
        return region.grant(self.connection).to_bytes().hex()

    async def use(self, work: Work, given: str) -> None:
        self._have(work)
        if given:
            grant = kvwire.Grant.from_bytes(bytes.fromhex(given))
            starts = range(0, len(grant), work.nbytes)
            self._grants = [grant[at : at + work.nbytes] for at in starts]

    async def fill(self, work: Work) -> None:
        await fill(self._memory)

    async def digest(self, work: Work) -> str:
        return digest(self._parts[0])

    async def drive(self, work: Work) -> dict[str, Any]:
        await self.connection.recv(_GO)
        if work.verb in (CONNECT, ROUND_TRIP):
            return {"values": [await self._round_trip(work) for _ in range(work.count)]}
        connection, parts = self.connection, self._parts
        begin: dict[str, Callable[[int], kvwire.Request[int]]] = {
            SEND: lambda i: connection.send(_DATA, parts[0]),
            PUT: lambda i: connection.put(parts[0], self._grants[i]),
            GET: lambda i: connection.get(self._grants[i], into=parts[i]),
        }
        began = time.perf_counter()
        await _keep_busy(work, begin[work.verb])
        if work.verb == SEND:
            await connection.recv(_DONE)
        elapsed_s = time.perf_counter() - began
        if work.verb != SEND:
            await connection.send(_DONE, b"")
        return {"values": [work.moved_bytes / elapsed_s]}

    async def serve(self, work: Work) -> dict[str, Any]:
        connection, parts = self.connection, self._parts
        await connection.send(_GO, b"")
        if work.verb in (CONNECT, ROUND_TRIP):
            for _ in range(work.count):
                if work.verb == CONNECT:
                    connection = await self.communicator.accept()
                await connection.recv(_DATA, self._memory)
                await connection.send(_BACK, self._memory)
        elif work.verb == SEND:
            await _keep_busy(work, lambda i: connection.recv(_DATA, parts[i]))
            await connection.send(_DONE, b"")
        else:
            await connection.recv(_DONE)
        return {}

    async def _round_trip(self, work: Work) -> float:
        """Seconds of one, with those of its connection if it has one of its own."""
        connection, began = self.connection, time.perf_counter()
        if work.verb == CONNECT:
            connection = await self.one_more()
        await connection.send(_DATA, self._memory)
        await connection.recv(_BACK, self._memory)
        elapsed_s = time.perf_counter() - began
        if work.verb == CONNECT:
            await connection.close()
        return elapsed_s

    def _have(self, work: Work) -> None:
        """Have the memory of a work."""
        if self._shape != (work.verb, work.nbytes):
            self._shape = work.verb, work.nbytes
            # Written to, so that no page is missing when it is timed.
            self._memory = np.ones(work.nbytes * work.in_flight, np.uint8)
            self._parts = np.split(self._memory, work.in_flight)


async def _keep_busy(work: Work, begin: Callable[[int], kvwire.Request[int]]) -> None:
    """Do the work with ``in_flight`` operations begun at any time."""
    pending: deque[kvwire.Request[int]] = deque()
    for number in range(work.count):
        if len(pending) == work.in_flight:
            await pending.popleft()
        pending.append(begin(number % work.in_flight))
    for request in pending:
        await request


def command(
    *,
    transport: str = "tcp",
    round_mib: Mebibytes = 256,
    rounds: Rounds = 10,
    common: Common = COMMON,
) -> int:
    """Round trips and new connections; send, put and get of 1 MiB and 16 MiB.

    Beside a ping-pong over bare streams of the same loop, and blocking sockets.

    Args:
        transport: The transport of kvwire.
        round_mib: MiB that each contender of a rate moves in a round.
        rounds: How often everybody does their work; more rounds, firmer medians.
        common: Options of every benchmark.
    """
    require_known([transport])
    options = {"transport": transport, "loop": common.loop, "by_link": 1}
    ours = Contender("kvwire", MessagesSide, options=options)
    streams = Contender(f"{common.loop} streams", StreamsSide, options=options)
    sockets = Contender("bare sockets", SocketsSide)
    times = [
        Case(
            name=f"{PING_BYTES} B {said}",
            work=Work(verb=verb, nbytes=PING_BYTES, count=count),
            unit=MICROSECONDS,
            contenders=[ours, streams],
            target=target,
            tail=True,
        )
        for said, verb, count, target in (
            (ROUND_TRIP, ROUND_TRIP, PINGS, PING_TARGET),
            ("on a new connection", CONNECT, CONNECTIONS, None),
        )
    ]
    rates = [
        Case(
            name=f"{size_name(nbytes)} {verb}",
            work=Work(
                verb=verb,
                nbytes=nbytes,
                count=max(IN_FLIGHT, round_mib * MIB // nbytes),
                in_flight=IN_FLIGHT,
            ),
            unit=GIGABYTES_PER_SECOND,
            contenders=[ours, sockets],
            target=RATE_TARGET,
        )
        for nbytes in SIZES
        for verb in (SEND, PUT, GET)
    ]
    benchmark = Benchmark(
        name="messages",
        cases=[*times, *rates],
        notes=[f"{IN_FLIGHT} operations in flight. Only kvwire checks what it moves."],
    )
    settings = {"transport": transport, "rounds": rounds, "round_mib": round_mib}
    return common.run(benchmark, **settings)
