"""The programs that kvwire is compared with: asyncio's streams, sockets, and memcpy."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import AsyncExitStack

import numpy as np

from kvwire.cli.bench.operations import GET, SETUP, OpsWork
from kvwire.cli.bench.side import (
    HOST,
    Bench,
    Seconds,
    digest,
    each_timed,
    fill,
    setups_timed,
)
from kvwire.limits import KIB

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def streams(b: Bench) -> None:
    """Run asyncio's bare streams: a round trip and nothing else.

    In a setup they connect, and get all bytes of a transfer as the answer to one byte.
    This is the minimum: no handshake beyond TCP's, no plan, no checksum.
    """
    async with AsyncExitStack() as opened:
        ball = Ball()
        if b.left:
            ball.port = await b.receive()
            ball.streams = await ball.connect()
            opened.callback(ball.streams[1].close)
        else:
            server = await asyncio.start_server(ball.answer, HOST, 0)
            opened.callback(server.close)
            await b.send(server.sockets[0].getsockname()[1])
        async for work in b.works(OpsWork):
            ball.data = os.urandom(work.nbytes)
            ball.setup = work.verb == SETUP
            async with b.clock():
                seconds = await ball.move(b, work)
            await b.report(seconds, digest(ball.data))


class Ball:
    """The bytes that travel back and forth, as they last arrived."""

    data: bytes
    setup: bool
    # Used on the left side.
    port: int
    streams: _Streams

    async def move(self, b: Bench, work: OpsWork) -> Seconds:
        if not b.left:
            await b.send()
            return ()
        await b.receive()  # the other side has its bytes
        if self.setup:
            return await setups_timed(work.count, self.connect, self.fetch, self.close)
        return await each_timed(work.count, self.there_and_back)

    async def connect(self) -> _Streams:
        return await asyncio.open_connection(HOST, self.port)

    async def close(self, streams: _Streams) -> None:
        streams[1].close()
        await streams[1].wait_closed()

    async def there_and_back(self, _: int) -> None:
        reader, writer = self.streams
        writer.write(self.data)
        self.data = await reader.readexactly(len(self.data))

    async def fetch(self, streams: _Streams) -> None:
        streams[1].write(b"!")
        self.data = await streams[0].readexactly(len(self.data))

    async def answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Right side: send back each message, or answer with a transfer's bytes."""
        while received := await reader.read(KIB):
            if not self.setup:
                self.data = received
            writer.write(self.data)
        writer.close()


async def sockets(b: Bench) -> None:
    """Run bare blocking sockets, as fast as one stream can be in Python.

    The receiving side rotates through as many buffers as other contenders have
    operations in flight. A single buffer would stay in the CPU cache and be
    unrealistically fast.
    """
    with await connected(b) as sock:
        # Allocated once, so that no round has to fault them in.
        made: dict[tuple[int, int], list[memoryview]] = {}
        async for work in b.works(OpsWork):
            key = work.nbytes, work.in_flight
            parts = made.get(key) or made.setdefault(
                key, [memoryview(bytearray(work.nbytes)) for _ in range(key[1])]
            )
            sent = [parts[0]] * work.count
            received = [parts[at % work.in_flight] for at in range(work.count)]
            if b.checks:
                await fill(parts[0])
            async with b.clock():
                seconds = await stream(b, sock, work.verb == GET, sent, received)
            await b.report(seconds, digest(parts[0]) if b.checks else "")


async def connected(b: Bench) -> socket.socket:
    """Connect the two sides with a blocking socket."""
    if b.left:
        return socket.create_connection((HOST, await b.receive()))
    with socket.create_server((HOST, 0)) as listener:
        await b.send(listener.getsockname()[1])
        return listener.accept()[0]


async def stream(
    b: Bench,
    sock: socket.socket,
    to_left: bool,
    sent: list[memoryview],
    received: list[memoryview],
) -> Seconds:
    """Send all parts from one side to the other; the left side measures the time."""
    if b.left:
        await b.receive()
    else:
        await b.send()
    began = time.perf_counter()
    if b.left == to_left:
        for part in received:
            receive_into(sock, part)
    else:
        for part in sent:
            sock.sendall(part)
    if not to_left:  # wait for a byte, which shows that everything has arrived
        if b.left:
            receive_into(sock, memoryview(bytearray(1)))
        else:
            sock.sendall(b"!")
    return [time.perf_counter() - began]


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


async def memcpy(b: Bench) -> None:
    """Copy the same number of contiguous bytes: the most that memory allows."""
    source = sink = np.zeros(0, np.uint8)
    b.facts["numpy"] = np.__version__
    async for work in b.works(OpsWork):
        if source.size != work.moved_bytes:
            # Written to first, so that timing includes no page faults.
            source, sink = (np.ones(work.moved_bytes, np.uint8) for _ in range(2))
        if b.checks:
            await fill(source)
        async with b.clock():
            began = time.perf_counter()
            np.copyto(sink, source)
            seconds = time.perf_counter() - began
        if b.checks and not np.array_equal(source, sink):
            raise RuntimeError("the copied bytes differ from the source")
        await b.report([seconds])
