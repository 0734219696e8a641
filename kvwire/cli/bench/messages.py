"""``kvwire bench messages``: a round trip, and messages, puts and gets at full rate."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import kvwire
from kvwire.cli.bench.pair import Contender, Work
from kvwire.cli.bench.report import (
    COMMON,
    Common,
    Mebibytes,
    Rounds,
    require_known,
    size_name,
)
from kvwire.cli.bench.side import HOST, ConnectedSide, Side, digest, fill
from kvwire.cli.bench.turns import GIGABYTES_PER_SECOND, MICROSECONDS, Benchmark, Case
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
ROUND_TRIP: Final = "round trip"

PING: Final = 1
PONG: Final = 2
DATA: Final = 3
READY: Final = 4
DONE: Final = 5


class Room:
    """Memory for operations of one size: a part for each of those in flight."""

    region: kvwire.Region

    def __init__(self, work: Work) -> None:
        self.memory: bytearray = bytearray(work.nbytes * work.in_flight)
        # The right side's parts, on the left side.
        self.grants: list[kvwire.Grant] = []
        whole = memoryview(self.memory)
        starts = range(0, len(whole), work.nbytes)
        self.parts = [whole[at : at + work.nbytes] for at in starts]


class KVWireSide(ConnectedSide[Work]):
    """Messages, puts and gets over one connection, with the default configuration."""

    by_link = True

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._rooms: dict[int, Room] = {}

    async def prepare(self, work: Work) -> str:
        room = self._room(work)
        if not hasattr(room, "region"):
            room.region = self.communicator.register(room.memory, access="readwrite")
        return room.region.grant(self.connection).to_bytes().hex()

    async def use(self, work: Work, given: str) -> None:
        grant = kvwire.Grant.from_bytes(bytes.fromhex(given))
        starts = range(0, work.nbytes * work.in_flight, work.nbytes)
        self._room(work).grants = [grant[at : at + work.nbytes] for at in starts]

    async def fill(self, work: Work) -> None:
        await fill(self._room(work).memory)

    async def digest(self, work: Work) -> str:
        return digest(self._room(work).parts[0])

    async def drive(self, work: Work) -> dict[str, Any]:
        connection, room = self.connection, self._room(work)
        clock, values = time.perf_counter, []
        if work.verb == ROUND_TRIP:
            for _ in range(work.count):
                began = clock()
                await connection.send(PING, room.memory)
                await connection.recv(PONG, room.memory)
                values.append(clock() - began)
            return {"values": values}
        parts, grants = room.parts, room.grants
        begin: dict[str, Callable[[int], kvwire.Request[int]]] = {
            "send": lambda i: connection.send(DATA, parts[0]),
            "put": lambda i: connection.put(parts[0], grants[i]),
            "get": lambda i: connection.get(grants[i], into=parts[i]),
        }
        await connection.recv(READY)
        began = clock()
        await _keep_busy(work, begin[work.verb])
        if work.verb == "send":
            await connection.recv(DONE)
        elapsed_s = clock() - began
        if work.verb != "send":
            await connection.send(DONE, b"")
        return {"values": [work.moved_bytes / elapsed_s]}

    async def serve(self, work: Work) -> dict[str, Any]:
        connection, room = self.connection, self._room(work)
        if work.verb == ROUND_TRIP:
            for _ in range(work.count):
                await connection.recv(PING, room.memory)
                await connection.send(PONG, room.memory)
            return {}
        await connection.send(READY, b"")
        if work.verb == "send":
            await _keep_busy(work, lambda i: connection.recv(DATA, room.parts[i]))
            await connection.send(DONE, b"")
        else:
            await connection.recv(DONE)
        return {}

    def _room(self, work: Work) -> Room:
        if work.nbytes not in self._rooms:
            self._rooms[work.nbytes] = Room(work)
        return self._rooms[work.nbytes]


async def _keep_busy(work: Work, begin: Callable[[int], kvwire.Request[int]]) -> None:
    """Do the work with ``in_flight`` operations begun at any time."""
    pending: deque[kvwire.Request[int]] = deque()
    for number in range(work.count):
        if len(pending) == work.in_flight:
            await pending.popleft()
        pending.append(begin(number % work.in_flight))
    for request in pending:
        await request


class StreamsSide(Side[Work]):
    """The streams of asyncio, bare: a round trip with which nothing else is done."""

    _server: asyncio.Server

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._joined = asyncio.Event()
        self._ball = b""

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self.take, HOST, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def accept(self) -> None:
        await self._joined.wait()

    async def connect(self, address: Any) -> dict[str, Any]:
        await self.take(*await asyncio.open_connection(HOST, address))
        return {"loop": type(asyncio.get_running_loop()).__module__.partition(".")[0]}

    async def fill(self, work: Work) -> None:
        ball = bytearray(work.nbytes)
        await fill(ball)
        self._ball = bytes(ball)

    async def digest(self, work: Work) -> str:
        return digest(self._ball)

    async def drive(self, work: Work) -> dict[str, Any]:
        reader, writer = self._reader, self._writer
        nbytes, ball = work.nbytes, self._ball
        clock, values = time.perf_counter, []
        for _ in range(work.count):
            began = clock()
            writer.write(ball)
            ball = await reader.readexactly(nbytes)
            values.append(clock() - began)
        self._ball = ball
        return {"values": values}

    async def serve(self, work: Work) -> dict[str, Any]:
        reader, writer, nbytes = self._reader, self._writer, work.nbytes
        for _ in range(work.count):
            self._ball = await reader.readexactly(nbytes)
            writer.write(self._ball)
        return {}

    async def close(self) -> None:
        if self._joined.is_set():
            self._writer.close()
        if hasattr(self, "_server"):
            self._server.close()

    async def take(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Use a connection that was made or accepted."""
        self._reader, self._writer = reader, writer
        self._joined.set()


class SocketsSide(Side[Work]):
    """Blocking sockets and nothing else: as fast as one stream of Python gets.

    The receiving side goes through as many buffers as operations are in flight
    elsewhere, since one that stays in the cache is not what anybody receives into.
    """

    _listener: socket.socket
    socket: socket.socket

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        # Not made anew, so that no round has to fault them in.
        self._rooms: dict[int, Room] = {}

    async def listen(self) -> int:
        self._listener = socket.create_server((HOST, 0))
        port: int = self._listener.getsockname()[1]
        return port

    async def accept(self) -> None:
        self.socket, _ = self._listener.accept()

    async def connect(self, address: Any) -> dict[str, Any]:
        self.socket = socket.create_connection((HOST, address))
        return {}

    async def fill(self, work: Work) -> None:
        await fill(self.parts(work)[0])

    async def digest(self, work: Work) -> str:
        return digest(self.parts(work)[0])

    async def drive(self, work: Work) -> dict[str, Any]:
        self.wait()
        began = time.perf_counter()
        if work.verb == "get":
            self.receive(work)
        else:
            self.send(work)
            self.wait()
        return {"values": [work.moved_bytes / (time.perf_counter() - began)]}

    async def serve(self, work: Work) -> dict[str, Any]:
        self.socket.sendall(b"!")
        if work.verb == "get":
            self.send(work)
        else:
            self.receive(work)
            self.socket.sendall(b"!")
        return {}

    async def close(self) -> None:
        for name in ("socket", "_listener"):
            if hasattr(self, name):
                getattr(self, name).close()

    def send(self, work: Work) -> None:
        """Send the same part for each operation."""
        for _ in range(work.count):
            self.socket.sendall(self.parts(work)[0])

    def receive(self, work: Work) -> None:
        """Receive into one part after the other."""
        for number in range(work.count):
            self.receive_into(self.parts(work)[number % work.in_flight])

    def parts(self, work: Work) -> list[memoryview]:
        """Return the memory of a work."""
        if work.nbytes not in self._rooms:
            self._rooms[work.nbytes] = Room(work)
        return self._rooms[work.nbytes].parts

    def receive_into(self, part: memoryview) -> None:
        """Fill memory from the socket."""
        have = 0
        while have < len(part):
            count = self.socket.recv_into(part[have:])
            if not count:
                raise ConnectionError("the other side has ended")
            have += count

    def wait(self) -> None:
        """Wait for a byte, which says that the other side is there too."""
        self.receive_into(memoryview(bytearray(1)))


def command(
    *,
    transport: str = "tcp",
    round_mib: Mebibytes = 256,
    rounds: Rounds = 10,
    common: Common = COMMON,
) -> int:
    """Round trips of 64 bytes; send, put and get of 1 MiB and 16 MiB.

    Beside a ping-pong over bare streams of the same loop, and blocking sockets.

    Args:
        transport: The transport of kvwire.
        round_mib: MiB that each contender of a rate moves in a round.
        rounds: How often everybody does their work; more rounds, firmer medians.
        common: Options of every benchmark.
    """
    require_known([transport])
    options = {"transport": transport, "loop": common.loop}
    ours = Contender("kvwire", KVWireSide, options=options)
    streams = Contender(f"{common.loop} streams", StreamsSide, options=options)
    sockets = Contender("bare sockets", SocketsSide)
    ping = Case(
        name=f"{PING_BYTES} B {ROUND_TRIP}",
        work=Work(verb=ROUND_TRIP, nbytes=PING_BYTES, count=PINGS),
        unit=MICROSECONDS,
        contenders=[ours, streams],
        target=PING_TARGET,
        tail=True,
    )
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
        for verb in ("send", "put", "get")
    ]
    benchmark = Benchmark(
        name="messages",
        cases=[ping, *rates],
        notes=[f"{IN_FLIGHT} operations in flight. Only kvwire checks what it moves."],
    )
    settings = {"transport": transport, "rounds": rounds, "round_mib": round_mib}
    return common.run(benchmark, **settings)
