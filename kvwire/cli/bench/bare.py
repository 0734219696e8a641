"""What stands beside kvwire: the streams of asyncio, bare sockets, and a memcpy."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from kvwire.cli.bench.operations import OpsWork
from kvwire.cli.bench.side import (
    HOST,
    BenchSide,
    Bytes,
    W,
    Work,
    digest,
    each_timed,
    fill,
    require_same,
)
from kvwire.limits import KIB


class StreamsSide(BenchSide[OpsWork]):
    """Runs the streams of asyncio, bare: a round trip and nothing else."""

    work_type: ClassVar[type[Work]] = OpsWork
    port: int
    _server: asyncio.Server
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._ball = b""

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self.answer, HOST, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def connect(self, address: Any) -> dict[str, Any]:
        self.port = address
        self._streams = await asyncio.open_connection(HOST, address)
        return {"loop": type(asyncio.get_running_loop()).__module__.partition(".")[0]}

    async def fill(self, work: OpsWork) -> None:
        ball = bytearray(work.nbytes)
        await fill(ball)
        self._ball = bytes(ball)

    async def digest(self, work: OpsWork) -> str:
        return digest(self._ball)

    async def drive(self, work: OpsWork) -> Sequence[float]:
        reader, writer = self._streams

        async def there_and_back(_: int) -> None:
            writer.write(self._ball)
            self._ball = await reader.readexactly(work.nbytes)

        return await each_timed(work.count, there_and_back)

    async def close(self) -> None:
        if hasattr(self, "_streams"):
            self._streams[1].close()
        if hasattr(self, "_server"):
            self._server.close()

    async def answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Right: send back what comes, until the connection ends."""
        while ball := await reader.read(KIB):
            self._ball = ball
            writer.write(ball)
        writer.close()


class SocketsSide(BenchSide[W]):
    """Blocking sockets and nothing else: as fast as one stream of Python gets.

    The receiving side goes through as many buffers as operations are in flight
    elsewhere, since one that stays in the cache is not what anybody receives into.
    """

    work_type: ClassVar[type[Work]] = OpsWork
    _listener: socket.socket
    socket: socket.socket

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        # Not made anew, so that no round has to fault them in.
        self._parts: dict[tuple[int, int], list[memoryview]] = {}

    async def listen(self) -> int:
        self._listener = socket.create_server((HOST, 0))
        port: int = self._listener.getsockname()[1]
        return port

    async def accept(self) -> None:
        self.socket, _ = self._listener.accept()

    async def connect(self, address: Any) -> dict[str, Any]:
        self.socket = socket.create_connection((HOST, address))
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

    async def close(self) -> None:
        for name in ("socket", "_listener"):
            if hasattr(self, name):
                getattr(self, name).close()

    def send(self, work: W) -> None:
        """Send the same part for each operation."""
        for _ in range(work.count):
            self.socket.sendall(self.parts(work)[0])

    def receive(self, work: W) -> None:
        """Receive into one part after the other."""
        for number in range(work.count):
            self.receive_into(self.parts(work)[number % work.in_flight])

    def parts(self, work: W) -> list[memoryview]:
        """Return the memory of a work."""
        key = work.nbytes, work.in_flight
        if key not in self._parts:
            made = [memoryview(bytearray(work.nbytes)) for _ in range(work.in_flight)]
            self._parts[key] = made
        return self._parts[key]

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


class MemcpySide(BenchSide[OpsWork]):
    """Copies as many bytes that lie side by side: what memory does at best."""

    work_type: ClassVar[type[Work]] = OpsWork
    _source: Bytes
    _sink: Bytes

    async def connect(self, address: Any) -> dict[str, Any]:
        return {"numpy": np.__version__}

    async def use(self, work: OpsWork, given: None) -> None:
        if not hasattr(self, "_source") or self._source.size != work.moved_bytes:
            self._source = np.ones(work.moved_bytes, np.uint8)
            self._sink = np.zeros_like(self._source)
            self._sink[:] = 1

    async def fill(self, work: OpsWork) -> None:
        await fill(self._source)

    async def drive(self, work: OpsWork) -> Sequence[float]:
        began = time.perf_counter()
        np.copyto(self._sink, self._source)
        return [time.perf_counter() - began]

    async def digest(self, work: OpsWork) -> str:
        require_same(digest(self._source), digest(self._sink))
        return ""
