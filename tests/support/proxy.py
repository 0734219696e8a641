"""A TCP proxy that is a bad network, byte for byte, for tests with real sockets.

::

    toxic = Cut(Direction.TO_SERVER, at=300, ending=Ending.RST)
    async with Proxy(address_of_the_server, toxic) as proxy:
        connection = await communicator.connect(proxy.address)

Each direction of a connection is a reader and a writer with a queue between them, so
that a delay holds up nothing but the bytes it delays. What chance decides, such as
jitter, follows from the seed and from which connection it is. Toxics may be changed
meanwhile; they are looked at whenever bytes pass. Positions are bytes of one direction
since its connection began, so a toxic hits the same byte each time, however the stream
was cut into reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import socket
import struct
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from kvwire.limits import KIB
from kvwire.types import Address


class Direction(enum.Enum):
    """Which way bytes go; the client is whoever connects to the proxy."""

    TO_SERVER = "to server"
    TO_CLIENT = "to client"

    @property
    def opposite(self) -> Direction:
        """The other way."""
        return _OPPOSITE[self]


_OPPOSITE = {
    Direction.TO_SERVER: Direction.TO_CLIENT,
    Direction.TO_CLIENT: Direction.TO_SERVER,
}


class Ending(enum.Enum):
    """How a cut ends a connection."""

    FIN = "fin"
    """Both sides see the end of the stream."""
    RST = "rst"
    """Both sides see a reset."""
    HALF_CLOSE = "half close"
    """The receiver of this direction sees the end of its stream, and nothing else."""
    SILENCE = "silence"
    """Nothing of this direction arrives any more, its end and its resets included."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Bytes arrive ``delay_s`` later, and up to ``jitter_s`` more, in order."""

    direction: Direction
    delay_s: float
    jitter_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """No more than so many bytes arrive in a second."""

    direction: Direction
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes arrive in pieces of ``nbytes``, each in a packet of its own."""

    direction: Direction
    nbytes: int = 1


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit of the byte at position ``at`` arrives inverted."""

    direction: Direction
    at: int
    bit: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """Exactly ``at`` bytes arrive; then the connection ends as ``ending`` says."""

    direction: Direction
    at: int
    ending: Ending


Toxic = Latency | Bandwidth | Slice | Flip | Cut


def schedule(seed: int, *, reach_bytes: int) -> tuple[Toxic, ...]:
    """Mix toxics by a seed; at most one of them ends the connection.

    Args:
        seed: Chooses the mix.
        reach_bytes: Positions are below this.
    """
    rng = random.Random(f"toxics {seed}")
    found: list[Toxic] = []
    for way in Direction:
        if rng.random() < 0.3:
            found.append(Latency(way, rng.uniform(0, 0.002), rng.uniform(0, 0.002)))
        if rng.random() < 0.2:
            found.append(Bandwidth(way, rng.uniform(2e6, 2e8)))
        if rng.random() < 0.3:
            found.append(Slice(way, rng.choice((33, 1000, 40_000))))
        if rng.random() < 0.2:
            found.append(Flip(way, rng.randrange(reach_bytes), rng.randrange(8)))
    if rng.random() < 0.5:
        way, ending = rng.choice(list(Direction)), rng.choice(list(Ending))
        found.append(Cut(way, rng.randrange(reach_bytes), ending))
    return tuple(found)


_READ_BYTES: Final = 64 * KIB
# Reads of one direction that wait to be passed on; beyond it their sender waits.
_QUEUED_READS: Final = 256
_BACKLOG: Final = 1024
# `struct linger`: on, 0 seconds, so that `close` resets.
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)

Directed = TypeVar("Directed", Latency, Bandwidth, Slice, Flip, Cut)


class Proxy:
    """Listens on a port of its own, and passes everything on but for its toxics.

    Attributes:
        address: Where to connect to; set once the block has been entered.
        toxics: What befalls the bytes that pass from now on.
        passed: Bytes that have arrived by direction, over all connections.
    """

    address: Address

    def __init__(self, server: Address, *toxics: Toxic, seed: int = 0) -> None:
        self.toxics = toxics
        self.passed: dict[Direction, int] = dict.fromkeys(Direction, 0)
        self._server = server
        self._seed = seed
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        toxics = ", ".join(map(repr, self.toxics)) or "no toxics"
        return f"<Proxy to {self._server}, seed {self._seed}: {toxics}>"

    async def __aenter__(self) -> Self:
        """Listen."""
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.address = Address("tcp", *self._socket.getsockname())
        asyncio.get_running_loop().add_reader(self._socket, self._accept)
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Stop listening, and end every connection."""
        asyncio.get_running_loop().remove_reader(self._socket)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    def _accept(self) -> None:
        try:
            client, _ = self._socket.accept()
        except OSError:
            return  # it has left, or another wake-up has taken it
        self._count += 1
        rng = random.Random(f"{self._seed}/{self._count}")
        task = asyncio.create_task(_Connection(self, client, rng).run(self._server))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Connection:
    """A client, and the connection to the server that was made for it."""

    def __init__(self, proxy: Proxy, client: socket.socket, rng: random.Random) -> None:
        server = socket.socket()
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.proxy = proxy
        self.rng = rng
        self._sockets = (client, server)
        self._ways = {
            Direction.TO_SERVER: _Way(self, client, server, Direction.TO_SERVER),
            Direction.TO_CLIENT: _Way(self, server, client, Direction.TO_CLIENT),
        }
        self._reset = asyncio.Event()

    async def run(self, server: Address) -> None:
        loop = asyncio.get_running_loop()
        try:
            try:
                await loop.sock_connect(self._sockets[1], (server.host, server.port))
            except OSError:
                self._reset.set()
            else:
                await self._carry()
        finally:
            for sock in self._sockets:
                if self._reset.is_set():
                    option = (socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                    sock.setsockopt(*option)
                sock.close()

    def end(self) -> None:
        """Both sides see the end of the stream; what they still say is dropped."""
        for way in self._ways.values():
            way.stop()
            way.say_end()

    def reset(self, direction: Direction | None = None) -> None:
        """Both sides see a reset, unless it would come by a silent direction."""
        if direction is None or not self._ways[direction].silent:
            self._reset.set()

    async def _carry(self) -> None:
        """Pass everything on until both sides have ended, or a reset."""
        steps = [
            asyncio.create_task(step)
            for way in self._ways.values()
            for step in (way.read(), way.write())
        ]
        resetting = asyncio.create_task(self._reset.wait())
        pending: set[asyncio.Task[Any]] = {resetting, *steps}
        try:
            while len(pending) > 1 and resetting in pending:
                _, pending = await asyncio.wait(
                    pending, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        for step in steps:
            if not step.cancelled():
                step.result()  # a bug of this proxy is not the network's


class _Way:
    """One direction of a connection."""

    def __init__(
        self,
        connection: _Connection,
        source: socket.socket,
        sink: socket.socket,
        direction: Direction,
    ) -> None:
        self.silent = False
        self._connection = connection
        self._source = source
        self._sink = sink
        self._direction = direction
        # Bytes with the time at which they came; none for the end of the stream.
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_READS)
        self._position = 0
        self._stopped = False
        self._due = 0.0

    async def read(self) -> None:
        loop = asyncio.get_running_loop()
        data = b"..."
        while data:
            try:
                data = await loop.sock_recv(self._source, _READ_BYTES)
            except OSError:
                data = b""
                self.stop()  # a reset is no end of the stream
                self._connection.reset(self._direction)
            await self._queue.put((loop.time(), data))

    async def write(self) -> None:
        data = b"..."
        while data:
            self._look_for_cut()
            arrived, data = await self._queue.get()
            self._look_for_cut()  # the toxics may be others by now
            if self._stopped:
                continue
            await self._wait_for(arrived)
            try:
                await self._pass_on(data)
            except OSError:
                self.stop()
                self._connection.reset(self._direction.opposite)
        if not self._stopped:
            self.say_end()

    def stop(self) -> None:
        """From now on drop what comes."""
        self._stopped = True

    def say_end(self) -> None:
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)

    async def _wait_for(self, arrived: float) -> None:
        latency = self._find(Latency)
        if latency is None:
            return
        late_s = latency.delay_s + self._connection.rng.uniform(0, latency.jitter_s)
        self._due = max(self._due, arrived + late_s)
        await asyncio.sleep(self._due - asyncio.get_running_loop().time())

    async def _pass_on(self, data: bytes) -> None:
        """Deliver bytes, in as many pieces as the toxics make of them."""
        loop = asyncio.get_running_loop()
        while data and not self._stopped:
            piece = self._damaged(data[: self._next_length(len(data))])
            data = data[len(piece) :]
            await loop.sock_sendall(self._sink, piece)
            self._position += len(piece)
            self._connection.proxy.passed[self._direction] += len(piece)
            self._look_for_cut()
            await self._rest_after(len(piece))

    def _next_length(self, length: int) -> int:
        """How much to send at once: up to the next position where something happens."""
        if sliced := self._find(Slice):
            length = min(length, sliced.nbytes)
        cut = self._find(Cut)
        if cut is not None and cut.at > self._position:
            length = min(length, cut.at - self._position)
        return length

    def _damaged(self, piece: bytes) -> bytes:
        flip = self._find(Flip)
        if flip is None or not 0 <= flip.at - self._position < len(piece):
            return piece
        damaged = bytearray(piece)
        damaged[flip.at - self._position] ^= 1 << flip.bit
        return bytes(damaged)

    async def _rest_after(self, nbytes: int) -> None:
        if bandwidth := self._find(Bandwidth):
            await asyncio.sleep(nbytes / bandwidth.bytes_per_s)
        elif self._find(Slice):
            await asyncio.sleep(0)

    def _look_for_cut(self) -> None:
        cut = self._find(Cut)
        if cut is None or self._stopped or self._position < cut.at:
            return
        self.stop()
        match cut.ending:
            case Ending.FIN:
                self._connection.end()
            case Ending.RST:
                self._connection.reset()
            case Ending.HALF_CLOSE:
                self.say_end()
            case Ending.SILENCE:
                self.silent = True

    def _find(self, kind: type[Directed]) -> Directed | None:
        for toxic in self._connection.proxy.toxics:
            if isinstance(toxic, kind) and toxic.direction is self._direction:
                return toxic
        return None
