"""The programs that kvwire is compared with: asyncio's streams, sockets, and memcpy."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import closing
from typing import Any, Final

import numpy as np

from kvwire_certify.bench.line import HOST, Line, Seconds, each_timed, turns
from kvwire_certify.bench.work import CONNECT, GET, PULL, ROUND_TRIP, SEND, Work, digest

_BYTE: Final = b"!"
_FROM_RIGHT: Final = (PULL, GET)


# --- streams: one operation after the other -------------------------------------------


async def streams_left(line: Line, options: dict[str, Any]) -> None:
    """Do each operation as one request of bytes and its answer, or as a write.

    This is the minimum: no handshake beyond TCP's, no plan, no checksum.
    """
    where = HOST, options["address"]
    reader, writer = await asyncio.open_connection(*where)
    await line.send({"facts": {}})

    async def connect(_: int) -> asyncio.StreamWriter:
        return (await asyncio.open_connection(*where))[1]

    async def close(made: asyncio.StreamWriter) -> None:
        made.close()
        await made.wait_closed()

    async for turn in turns(line):
        request, nbytes = _exchange(turn.work)

        async def ask(_: int, request: bytes = request, nbytes: int = nbytes) -> None:
            writer.write(request)
            if nbytes:
                await reader.readexactly(nbytes)
            else:
                await writer.drain()

        began_s = time.process_time()
        if turn.work.verb == CONNECT:
            seconds = await each_timed(turn.work.count, connect, close)
        else:
            seconds = await each_timed(turn.work.count, ask)
        cpu_s = time.process_time() - began_s
        await line.send({"seconds": seconds, "cpu_s": cpu_s, "digest": ""})
    writer.close()


async def streams_right(line: Line, options: dict[str, Any]) -> None:
    """Answer each request; see :func:`streams_left`."""
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
        asyncio.Queue()
    )
    server = await asyncio.start_server(lambda *new: accepted.put_nowait(new), HOST, 0)
    await line.send({"address": server.sockets[0].getsockname()[1], "facts": {}})
    reader, writer = await accepted.get()
    async for turn in turns(line):
        request, nbytes = _exchange(turn.work)
        answer = bytes(nbytes)
        began_s = time.process_time()
        await line.send({"offer": ""})
        for _ in range(0 if turn.work.verb == CONNECT else turn.work.count):
            await reader.readexactly(len(request))
            writer.write(answer)
        await line.receive()
        cpu_s = time.process_time() - began_s
        while not accepted.empty():
            accepted.get_nowait()[1].close()
        await line.send({"cpu_s": cpu_s, "digest": ""})
    writer.close()
    server.close()


def _exchange(work: Work) -> tuple[bytes, int]:
    """Return the request of an operation, and how many bytes the answer has."""
    data = bytes(work.nbytes)
    if work.verb in _FROM_RIGHT:
        return _BYTE, work.nbytes
    if work.verb == SEND:
        return data, 0
    return data, work.nbytes if work.verb == ROUND_TRIP else len(_BYTE)


# --- sockets: a round's bytes in one stream -------------------------------------------


async def sockets_left(line: Line, options: dict[str, Any]) -> None:
    """Move all bytes by blocking calls, as fast as one stream can be in Python."""
    with socket.create_connection((HOST, options["address"])) as sock:
        await line.send({"facts": {}})
        await _stream(line, sock, is_left=True)


async def sockets_right(line: Line, options: dict[str, Any]) -> None:
    """See :func:`sockets_left`."""
    with socket.create_server((HOST, 0)) as listener:
        await line.send({"address": listener.getsockname()[1], "facts": {}})
        with closing(listener.accept()[0]) as sock:
            await _stream(line, sock, is_left=False)


async def _stream(line: Line, sock: socket.socket, *, is_left: bool) -> None:
    """Do each round.

    The receiving side rotates through as many buffers as kvwire has operations in
    flight. A single buffer would stay in the CPU cache and be unrealistically fast.
    """
    rooms: dict[tuple[int, int], list[memoryview]] = {}
    async for turn in turns(line):
        work = turn.work
        key = work.nbytes, work.in_flight
        if key not in rooms:
            # Allocated once, so that no round has to fault them in.
            rooms[key] = [memoryview(bytearray(work.nbytes)) for _ in range(key[1])]
        parts = rooms[key]
        receives = is_left == (work.verb in _FROM_RIGHT)
        if turn.checks and not receives:
            parts[0][:] = np.random.default_rng().bytes(work.nbytes)
        began_s = time.process_time()
        if not is_left:
            await line.send({"offer": ""})
        seconds = _move(sock, work, parts, receives=receives)
        if not is_left:
            await line.receive()
        cpu_s = time.process_time() - began_s
        # Of the part that arrived last.
        last = parts[(work.count - 1) % work.in_flight if receives else 0]
        found = digest(last) if turn.checks else ""
        await line.send({"seconds": seconds, "cpu_s": cpu_s, "digest": found})


def _move(
    sock: socket.socket, work: Work, parts: list[memoryview], *, receives: bool
) -> Seconds:
    """Send or receive a round's bytes; a byte asks for them, or confirms them."""
    asks = work.verb in _FROM_RIGHT
    signal = memoryview(bytearray(_BYTE))
    began = time.perf_counter()
    if receives:
        if asks:
            sock.sendall(signal)
        for number in range(work.count):
            receive_into(sock, parts[number % work.in_flight])
        if not asks:
            sock.sendall(signal)
    else:
        if asks:
            receive_into(sock, signal)
        for _ in range(work.count):
            sock.sendall(parts[0])
        if not asks:
            receive_into(sock, signal)
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


# --- memcpy ---------------------------------------------------------------------------


async def memcpy(line: Line, options: dict[str, Any]) -> None:
    """Copy the same number of contiguous bytes: the most that memory allows."""
    source = sink = np.zeros(0, np.uint8)
    await line.send({"facts": {"numpy": np.__version__}})
    async for turn in turns(line):
        if source.size != turn.work.moved_bytes:
            # Written to first, so that timing includes no page faults.
            source, sink = (np.ones(turn.work.moved_bytes, np.uint8) for _ in range(2))
        began_s = time.process_time()
        began = time.perf_counter()
        np.copyto(sink, source)
        seconds = [time.perf_counter() - began]
        cpu_s = time.process_time() - began_s
        await line.send({"seconds": seconds, "cpu_s": cpu_s, "digest": ""})
