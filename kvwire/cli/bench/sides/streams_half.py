"""The streams of asyncio, bare: a round trip with which nothing else is done."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kvwire.cli.bench.case import Work
from kvwire.cli.bench.sides.half import HOST, Half, digest, fill


class StreamsHalf(Half):
    """StreamReader and StreamWriter, over the transports of whatever loop runs."""

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _server: asyncio.Server

    def __init__(self) -> None:
        self._accepted = asyncio.Event()

    async def listen(self) -> dict[str, Any]:
        """See Half."""
        self._server = await asyncio.start_server(self._take, HOST, 0)
        return {"address": self._server.sockets[0].getsockname()[1]}

    async def accept(self) -> dict[str, Any]:
        """See Half."""
        await self._accepted.wait()
        return {}

    async def connect(self, address: Any) -> dict[str, Any]:
        """See Half."""
        await self._take(*await asyncio.open_connection(HOST, address))
        loop = asyncio.get_running_loop()
        return {"loop": type(loop).__module__.partition(".")[0]}

    async def check_left(self, work: Work) -> dict[str, Any]:
        """See Half."""
        ball = memoryview(bytearray(work.nbytes))
        fill(ball)
        self._writer.write(ball)
        return {"digest": digest(await self._reader.readexactly(work.nbytes))}

    async def check_right(self, work: Work) -> dict[str, Any]:
        """See Half."""
        ball = await self._reader.readexactly(work.nbytes)
        self._writer.write(ball)
        return {"digest": digest(ball)}

    async def drive(self, work: Work) -> dict[str, Any]:
        """See Half."""
        reader, writer = self._reader, self._writer
        nbytes, ball = work.nbytes, bytes(work.nbytes)
        clock, values = time.perf_counter, []
        for _ in range(work.count):
            began = clock()
            writer.write(ball)
            await reader.readexactly(nbytes)
            values.append(clock() - began)
        return {"values": values}

    async def serve(self, work: Work) -> dict[str, Any]:
        """See Half."""
        reader, writer, nbytes = self._reader, self._writer, work.nbytes
        for _ in range(work.count):
            writer.write(await reader.readexactly(nbytes))
        return {}

    async def close(self) -> None:
        """See Half."""
        if hasattr(self, "_writer"):
            self._writer.close()
        if hasattr(self, "_server"):
            self._server.close()

    async def _take(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader, self._writer = reader, writer
        self._accepted.set()
