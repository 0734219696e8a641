"""kvwire itself: windows for gets, granted regions for puts.

The variant is a transport: ``kvwire:tcp``, ``kvwire:local``, ``kvwire:ucx``.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar

import msgspec

import kvwire
from kvwire.memory.copy import address_of
from kvwire_certify.transport import End

T = TypeVar("T")

_BLOCK_BYTES: Final = 4096
# Both ends are on one host, whose other devices may come and go. The environment takes
# precedence.
_BACKENDS: Final = {"ucx": {"NET_DEVICES": "lo"}}


class KvwireReference(msgspec.Struct, array_like=True):
    """The permissions to read and to write the same memory."""

    ticket: bytes
    grant: bytes


class KvwireEnd(End):
    """A communicator, with a window over all of its memory."""

    version: str = kvwire.__version__

    async def open(self, memory: memoryview) -> bytes:
        self.start: int = address_of(memory)
        self.offered: dict[bytes, tuple[range, kvwire.Region]] = {}
        self.comm: kvwire.Communicator = await kvwire.open(backends=_BACKENDS)
        self.window: kvwire.Window = self.comm.expose(
            "all", memory, block_bytes=_BLOCK_BYTES
        )
        return str(await self.comm.listen("tcp://127.0.0.1:0")).encode()

    async def connect(self, peer: bytes) -> None:
        transport = self.variant or "tcp"
        self.outgoing: kvwire.Connection
        self.incoming: kvwire.Connection
        self.outgoing, self.incoming = await asyncio.gather(
            self.comm.connect(peer.decode(), transport=transport), self.comm.accept()
        )
        self.remote: kvwire.RemoteWindow = await self.outgoing.window("all")

    async def offer(self, data: memoryview) -> bytes:
        first = (address_of(data) - self.start) // _BLOCK_BYTES
        blocks = range(first, first + len(data) // _BLOCK_BYTES)
        region = self.comm.register(data, access="write")
        grant = region.grant(self.incoming).to_bytes()
        both = KvwireReference(self.window.offer(blocks), grant)
        reference = msgspec.msgpack.encode(both)
        self.offered[reference] = blocks, region
        return reference

    async def withdraw(self, reference: bytes) -> None:
        blocks, region = self.offered.pop(reference)
        self.window.withdraw(blocks)
        await region.close()

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        ticket = msgspec.msgpack.decode(reference, type=KvwireReference).ticket
        request = self.remote.get(ticket, into, deadline=timeout_s)
        return (await ended(request)).complete

    async def put(
        self, reference: bytes, data: memoryview, timeout_s: float | None
    ) -> bool:
        raw = msgspec.msgpack.decode(reference, type=KvwireReference).grant
        grant = kvwire.Grant.from_bytes(raw)
        request = self.outgoing.put(data, grant, deadline=timeout_s)
        return await ended(request) == len(data)

    async def close(self) -> None:
        self.comm.abort()
        for _, region in self.offered.values():
            await region.close()
        await self.window.close()
        await self.comm.close()


async def ended(request: kvwire.Request[T]) -> T:
    """Wait until a request has ended and its memory is free."""
    try:
        return await request
    finally:
        await request.released()


TARGET = KvwireEnd
