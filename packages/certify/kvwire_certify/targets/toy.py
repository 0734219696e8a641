"""A correct transport in 60 lines, and the example of an adapter.

Each operation uses a separate TCP connection, whose request is a reference, and for a
put the data. Both ends copy within one turn of their loop, right after checking that
they may still touch the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import weakref

from kvwire_certify.transport import End


class Toy(End):
    """Sends a reference, and receives the reference's bytes."""

    async def open(self, memory: memoryview) -> bytes:
        self.offered: dict[bytes, memoryview] = {}
        self.writers: weakref.WeakSet[asyncio.StreamWriter] = weakref.WeakSet()
        self.server: asyncio.Server = await asyncio.start_server(
            self.serve, "127.0.0.1", 0
        )
        return b"%d" % self.server.sockets[0].getsockname()[1]

    async def offer(self, data: memoryview) -> bytes:
        reference = secrets.token_bytes(16)
        self.offered[reference] = data
        return reference

    async def withdraw(self, reference: bytes) -> None:
        self.offered.pop(reference, None)

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool | bytes:
        answer = await self.ask(reference, timeout_s)
        return len(answer) == len(into) and answer

    async def put(
        self, reference: bytes, data: memoryview, timeout_s: float | None
    ) -> bool:
        return await self.ask(reference + data, timeout_s) == b"done"

    async def ask(self, request: bytes, timeout_s: float | None) -> bytes:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(self.peer))
            self.writers.add(writer)
            try:
                writer.write(request)
                writer.write_eof()
                return await reader.read()
            finally:
                writer.transport.abort()

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.writers.add(writer)
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            request = await reader.read()
            view = self.offered.get(request[:16], memoryview(b""))
            data = request[16:]
            if not data:
                writer.write(bytes(view))
            elif len(data) == len(view):
                view[:] = data
                writer.write(b"done")
            await writer.drain()

    async def close(self) -> None:
        self.offered.clear()  # a request that has already arrived finds nothing
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()


TARGET = Toy
