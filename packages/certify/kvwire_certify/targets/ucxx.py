"""ucxx's asyncio client: ``send`` and ``recv`` of an endpoint, with tags.

Its Python API has no reads and writes of remote memory. So the left end requests each
operation over TCP, and the right end answers with a message. Withdrawing means that no
further request is answered, and that running answers have ended. Cancelling a call
cancels its await. Each end sends on the endpoint that it has created, and receives on
the other's.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import struct
from collections.abc import AsyncIterator
from typing import Any, Final

import numpy as np
import ucxx

from kvwire_certify.transport import End

# The default is 5 seconds, which is too short on a busy machine.
_CONNECTS_S: Final = 20.0
# Whether to put, the reference, and the message's tag.
_REQUEST: Final = struct.Struct("<?16sI")
_TAG_BITS: Final = 31


class UcxxEnd(End):
    """A listener, one endpoint in each direction, and a server for requests."""

    version: str = ucxx.__version__

    async def open(self, memory: memoryview) -> bytes:
        self.offered: dict[bytes, memoryview] = {}
        self.answers: dict[bytes, set[asyncio.Future[None]]] = {}
        self.writers: set[asyncio.StreamWriter] = set()
        self.server: asyncio.Server = await asyncio.start_server(
            self.serve, "127.0.0.1", 0
        )
        self.accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.listener: Any = ucxx.create_listener(
            self.accepted.set_result, connect_timeout=_CONNECTS_S
        )
        asked = self.server.sockets[0].getsockname()[1]
        return b"%d %d" % (self.listener.port, asked)

    async def connect(self, peer: bytes) -> None:
        listens, asked = map(int, peer.split())
        self.port: int = asked
        self.outgoing: Any = await ucxx.create_endpoint(
            "127.0.0.1", listens, connect_timeout=_CONNECTS_S
        )
        self.incoming: Any = await self.accepted

    async def message(
        self, sends: bool, memory: memoryview, tag: int, timeout_s: float | None
    ) -> None:
        call = self.outgoing.send if sends else self.incoming.recv
        async with asyncio.timeout(timeout_s):
            await call(np.frombuffer(memory, np.uint8), tag, force_tag=True)

    async def offer(self, data: memoryview) -> bytes:
        reference = secrets.token_bytes(16)
        self.offered[reference] = data
        self.answers[reference] = set()
        return reference

    async def withdraw(self, reference: bytes) -> None:
        del self.offered[reference]
        answers = self.answers.pop(reference)
        if answers:
            await asyncio.wait(answers)

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        async with self.asked(False, reference) as asked:
            if asked is not None:
                _, tag = asked
                await self.message(False, into, tag, timeout_s)
            return asked is not None

    async def put(
        self, reference: bytes, data: memoryview, timeout_s: float | None
    ) -> bool:
        async with self.asked(True, reference) as asked:
            if asked is None:
                return False
            reader, tag = asked
            await self.message(True, data, tag, timeout_s)
            return bool(await reader.read(1))

    @contextlib.asynccontextmanager
    async def asked(
        self, puts: bool, reference: bytes
    ) -> AsyncIterator[tuple[asyncio.StreamReader, int] | None]:
        """Request an operation; yield its stream and tag.

        Yield None if the other end offers no memory under this reference.
        """
        tag = secrets.randbits(_TAG_BITS)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.add(writer)
        try:
            writer.write(_REQUEST.pack(puts, reference, tag))
            found = await reader.read(1)
            writer.write(found)
            yield (reader, tag) if found else None
        finally:
            self.writers.discard(writer)
            writer.transport.abort()

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            request = await reader.readexactly(_REQUEST.size)
            puts, reference, tag = _REQUEST.unpack(request)
            view = self.offered.get(reference)
            if view is not None:
                writer.write(b"y")
                answers = self.answers[reference]
                answer = asyncio.ensure_future(self.answer(reader, puts, view, tag))
                answers.add(answer)
                await asyncio.wait([answer])
                answers.discard(answer)
                if answer.exception() is None:
                    writer.write(b"y")
        self.writers.discard(writer)
        writer.close()

    async def answer(
        self, reader: asyncio.StreamReader, puts: bool, view: memoryview, tag: int
    ) -> None:
        """Do this end's part of an operation, once the other end has begun its own."""
        await reader.readexactly(1)
        await self.message(not puts, view, tag, None)

    async def close(self) -> None:
        self.offered.clear()
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()
        await self.outgoing.close()
        await self.incoming.close()
        self.listener.close()


TARGET = UcxxEnd
