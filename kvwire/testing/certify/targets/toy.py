"""A correct transport in 70 lines, and the example of an adapter.

Each operation uses a separate TCP connection. Both ends copy within one turn of their
loop, right after checking that they may still touch the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Final

from kvwire.testing.certify.transport import End

_REFERENCE_BYTES: Final = 16


class Toy(End):
    """Sends a reference, and receives the reference's bytes."""

    version = "1"

    async def open(self, memory: memoryview) -> bytes:
        self.offered: dict[bytes, memoryview] = {}
        self.writers: set[asyncio.StreamWriter] = set()
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        return b"%d" % self.server.sockets[0].getsockname()[1]

    async def connect(self, peer: bytes) -> None:
        self.port = int(peer)

    async def offer(self, data: memoryview) -> bytes:
        reference = secrets.token_bytes(_REFERENCE_BYTES)
        self.offered[reference] = data
        return reference

    async def withdraw(self, reference: bytes) -> None:
        self.offered.pop(reference, None)

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        answer = await self.ask(b"g" + reference, timeout_s)
        if len(answer) == len(into):
            into[:] = answer
        return len(answer) == len(into)

    async def put(
        self, reference: bytes, data: memoryview, timeout_s: float | None
    ) -> bool:
        return await self.ask(b"p" + reference + data, timeout_s) == b"done"

    async def ask(self, request: bytes, timeout_s: float | None) -> bytes:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            self.writers.add(writer)
            try:
                writer.write(request)
                writer.write_eof()
                return await reader.read()
            finally:
                self.writers.discard(writer)
                writer.transport.abort()

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.writers.add(writer)
        with contextlib.suppress(ConnectionError):
            request = await reader.read()
            reference = request[1 : 1 + _REFERENCE_BYTES]
            data = request[1 + _REFERENCE_BYTES :]
            view = self.offered.get(reference, memoryview(b""))
            if request[:1] == b"g":
                writer.write(view)
            elif view and len(data) == len(view):
                view[:] = data
                writer.write(b"done")
            await writer.drain()
        self.writers.discard(writer)
        writer.close()

    async def close(self) -> None:
        self.offered.clear()  # a request that has already arrived finds nothing
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()


TARGET = Toy
