"""A TCP proxy that is a bad network, byte for byte, for tests with real sockets.

::

    toxic = Cut(Direction.TO_SERVER, at=300, ending=Ending.RST)
    async with Proxy(address_of_the_server, toxic) as proxy:
        connection = await communicator.connect(proxy.address)

Each direction of a connection is a reader and a writer with a queue between them, so
that a delay holds up nothing but the bytes it delays. Toxics may be changed meanwhile;
they are looked at whenever bytes pass. Positions are bytes of one direction
since its connection began, so a toxic hits the same byte each time, however the stream
was cut into reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final, Self, TypeVar

from kvwire.limits import KIB
from kvwire.types import Address


class Direction(enum.Enum):
    """Which way bytes go; the client is whoever connects to the proxy."""

    TO_SERVER = "to server"
    TO_CLIENT = "to client"


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
    """Bytes arrive ``delay_s`` later."""

    direction: Direction
    delay_s: float


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """No more than so many bytes arrive in a second."""

    direction: Direction
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Exactly ``at`` bytes arrive; then the connection ends as ``ending`` says."""

    direction: Direction
    at: int
    ending: Ending


Toxic = Latency | Bandwidth | Cut


_READ_BYTES: Final = 64 * KIB
# Reads of one direction that wait to be passed on; beyond it their sender waits.
_QUEUED_READS: Final = 256
_BACKLOG: Final = 1024
# `struct linger`: on, 0 seconds, so that `close` resets.
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)

Directed = TypeVar("Directed", Latency, Bandwidth, Cut)


class Proxy:
    """Listens on a port of its own, and passes everything on but for its toxics.

    Attributes:
        address: Where to connect to; set once the block has been entered.
        toxics: What befalls the bytes that pass from now on.
        server: Where connections from now on lead.
        passed: Bytes that have arrived by direction, over all connections.
    """

    address: Address

    def __init__(self, server: Address, *toxics: Toxic) -> None:
        self.toxics = toxics
        self.passed: dict[Direction, int] = dict.fromkeys(Direction, 0)
        self.server = server
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        toxics = ", ".join(map(repr, self.toxics)) or "no toxics"
        return f"<Proxy to {self.server}: {toxics}>"

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
        task = asyncio.create_task(_Connection(self, client).run(self.server))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _ResetError(Exception):
    """Both sides are to see a reset."""


class _Connection:
    """A client, and the connection to the server that was made for it."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        server = socket.socket()
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.proxy = proxy
        self._sockets = (client, server)
        self.there = _Way(self, client, server, Direction.TO_SERVER)
        self.back = _Way(self, server, client, Direction.TO_CLIENT)
        self.there.opposite, self.back.opposite = self.back, self.there

    async def run(self, server: Address) -> None:
        """Pass everything on until both sides have ended, or a reset."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(self._sockets[1], (server.host, server.port))
            async with asyncio.TaskGroup() as steps:
                for way in (self.there, self.back):
                    steps.create_task(_in_a_later_turn(way.read()))
                    steps.create_task(_in_a_later_turn(way.write()))
        except* (OSError, _ResetError):
            for sock in self._sockets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        finally:
            for sock in self._sockets:
                sock.close()


async def _in_a_later_turn(step: Awaitable[None]) -> None:
    """Begin when all are there: an eager task that fails at once ends its group."""
    await asyncio.sleep(0)
    await step


class _Way:
    """One direction of a connection."""

    opposite: _Way

    def __init__(
        self,
        connection: _Connection,
        source: socket.socket,
        sink: socket.socket,
        direction: Direction,
    ) -> None:
        self._silent = False
        self._connection = connection
        self._source = source
        self._sink = sink
        self._direction = direction
        # Bytes with the time at which they came; none for the end of the stream.
        self._queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_READS)
        self._position = 0
        self._stopped = False

    async def read(self) -> None:
        loop = asyncio.get_running_loop()
        data = b"..."
        while data:
            try:
                data = await loop.sock_recv(self._source, _READ_BYTES)
            except OSError:
                data = b""
                self._stop()  # a reset is no end of the stream
                self._pass_reset_on()
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
                self._stop()
                self.opposite._pass_reset_on()
        if not self._stopped:
            self._say_end()

    def _stop(self) -> None:
        """From now on drop what comes."""
        self._stopped = True

    def _say_end(self) -> None:
        with contextlib.suppress(OSError):
            self._sink.shutdown(socket.SHUT_WR)

    def _pass_reset_on(self) -> None:
        if not self._silent:
            raise _ResetError

    async def _wait_for(self, arrived: float) -> None:
        latency = self._find(Latency)
        if latency is None:
            return
        due = arrived + latency.delay_s
        await asyncio.sleep(due - asyncio.get_running_loop().time())

    async def _pass_on(self, data: bytes) -> None:
        """Deliver bytes, in as many pieces as the toxics make of them."""
        loop = asyncio.get_running_loop()
        while data and not self._stopped:
            piece = data[: self._next_length(len(data))]
            data = data[len(piece) :]
            await loop.sock_sendall(self._sink, piece)
            self._position += len(piece)
            self._connection.proxy.passed[self._direction] += len(piece)
            self._look_for_cut()
            await self._rest_after(len(piece))

    def _next_length(self, length: int) -> int:
        """How much to send at once: up to the next position where something happens."""
        cut = self._find(Cut)
        if cut is not None and cut.at > self._position:
            length = min(length, cut.at - self._position)
        return length

    async def _rest_after(self, nbytes: int) -> None:
        if bandwidth := self._find(Bandwidth):
            await asyncio.sleep(nbytes / bandwidth.bytes_per_s)

    def _look_for_cut(self) -> None:
        cut = self._find(Cut)
        if cut is None or self._stopped or self._position < cut.at:
            return
        self._stop()
        match cut.ending:
            case Ending.FIN:
                # What both sides still say is dropped.
                self._say_end()
                self.opposite._stop()
                self.opposite._say_end()
            case Ending.RST:
                raise _ResetError
            case Ending.HALF_CLOSE:
                self._say_end()
            case Ending.SILENCE:
                self._silent = True

    def _find(self, kind: type[Directed]) -> Directed | None:
        for toxic in self._connection.proxy.toxics:
            if isinstance(toxic, kind) and toxic.direction is self._direction:
                return toxic
        return None
