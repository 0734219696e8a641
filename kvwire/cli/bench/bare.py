"""What stands beside kvwire: the streams of asyncio, bare sockets, and a memcpy."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from kvwire.cli.bench.operations import SETUP, OpsWork
from kvwire.cli.bench.side import (
    HOST,
    BenchSide,
    W,
    Work,
    digest,
    each_timed,
    fill,
    require_same,
    setups_timed,
)
from kvwire.limits import KIB

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class StreamsSide(BenchSide[OpsWork]):
    """Runs the streams of asyncio, bare: a round trip and nothing else.

    In a setup they connect, and have one byte answered with all of a transfer: what
    cannot be less. No handshake above that of TCP, no plan, no checksum.
    """

    work_type: ClassVar[type[Work]] = OpsWork
    _streams: _Streams

    async def listen(self) -> int:
        server = await asyncio.start_server(self._answer, HOST, 0)
        self.opened.callback(server.close)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def connect(self, address: Any) -> dict[str, Any]:
        self._port = address
        self._streams = await asyncio.open_connection(HOST, address)
        self.opened.callback(self._streams[1].close)
        return {}

    async def prepare(self, work: OpsWork) -> None:
        self._work, self._ball = work, os.urandom(work.nbytes)

    async def use(self, work: OpsWork, given: None) -> None:
        await self.prepare(work)

    async def digest(self, work: OpsWork) -> str:
        return digest(self._ball)

    async def drive(self, work: OpsWork) -> Sequence[float]:
        if work.verb == SETUP:
            return await setups_timed(
                work.count,
                lambda: asyncio.open_connection(HOST, self._port),
                self._transfer,
                _close,
            )
        reader, writer = self._streams

        async def there_and_back(_: int) -> None:
            writer.write(self._ball)
            self._ball = await reader.readexactly(work.nbytes)

        return await each_timed(work.count, there_and_back)

    async def _transfer(self, streams: _Streams) -> None:
        streams[1].write(b"!")
        self._ball = await streams[0].readexactly(len(self._ball))

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Right: send back what comes, or the bytes of a transfer."""
        while asked := await reader.read(KIB):
            if self._work.verb != SETUP:
                self._ball = asked
            writer.write(self._ball)
        writer.close()


async def _close(streams: _Streams) -> None:
    streams[1].close()
    await streams[1].wait_closed()


class SocketsSide(BenchSide[W]):
    """Blocking sockets and nothing else: as fast as one stream of Python gets.

    The receiving side goes through as many buffers as operations are in flight
    elsewhere, since one that stays in the cache is not what anybody receives into.
    """

    work_type: ClassVar[type[Work]] = OpsWork
    socket: socket.socket

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        # Not made anew, so that no round has to fault them in.
        self._parts: dict[tuple[int, int], list[memoryview]] = {}

    async def listen(self) -> int:
        listener = socket.create_server((HOST, 0))
        self._listener = self.opened.enter_context(listener)
        port: int = listener.getsockname()[1]
        return port

    async def accept(self) -> None:
        self.socket = self.opened.enter_context(self._listener.accept()[0])

    async def connect(self, address: Any) -> dict[str, Any]:
        made = socket.create_connection((HOST, address))
        self.socket = self.opened.enter_context(made)
        return {}

    async def fill(self, work: W) -> None:
        await fill(self.parts(work)[0])

    async def digest(self, work: W) -> str:
        return digest(self.parts(work)[0])

    async def drive(self, work: W) -> Sequence[float]:
        self.wait()
        began = time.perf_counter()
        if work.verb == "get":
            self.receive(work)
        else:
            self.send(work)
            self.wait()
        return [time.perf_counter() - began]

    async def serve(self, work: W) -> None:
        self.socket.sendall(b"!")
        if work.verb == "get":
            self.send(work)
        else:
            self.receive(work)
            self.socket.sendall(b"!")

    def send(self, work: W) -> None:
        """Send the same part for each operation."""
        for _ in range(work.count):
            self.socket.sendall(self.parts(work)[0])

    def receive(self, work: W) -> None:
        """Receive into one part after the other."""
        for number in range(work.count):
            receive_into(self.socket, self.parts(work)[number % work.in_flight])

    def parts(self, work: W) -> list[memoryview]:
        """Return the memory of a work."""
        key = work.nbytes, work.in_flight
        if key not in self._parts:
            made = [memoryview(bytearray(work.nbytes)) for _ in range(work.in_flight)]
            self._parts[key] = made
        return self._parts[key]

    def wait(self) -> None:
        """Wait for a byte, which says that the other side is there too."""
        receive_into(self.socket, memoryview(bytearray(1)))


def receive_into(source: socket.socket, part: memoryview) -> None:
    """Fill memory from a socket.

    Raises:
        ConnectionError: The other side has ended.
    """
    have = 0
    while have < len(part):
        count = source.recv_into(part[have:])
        if not count:
            raise ConnectionError("the other side has ended the connection")
        have += count


class MemcpySide(BenchSide[OpsWork]):
    """Copies as many bytes that lie side by side: what memory does at best."""

    work_type: ClassVar[type[Work]] = OpsWork

    async def connect(self, address: Any) -> dict[str, Any]:
        return {"numpy": np.__version__}

    async def use(self, work: OpsWork, given: None) -> None:
        if self.memory.size != work.moved_bytes:
            # Written to, so that no page is missing when it is timed.
            self.memory = np.ones(work.moved_bytes, np.uint8)
            self._sink = np.ones(work.moved_bytes, np.uint8)

    async def drive(self, work: OpsWork) -> Sequence[float]:
        began = time.perf_counter()
        np.copyto(self._sink, self.memory)
        return [time.perf_counter() - began]

    async def digest(self, work: OpsWork) -> str:
        require_same(digest(self.memory), digest(self._sink))
        return ""
