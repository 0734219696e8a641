"""Mooncake's transfer engine over TCP; its blocking calls run on a thread.

An offer registers its memory, and withdrawing unregisters it. The engine cannot cancel
a transfer, so a cancelled call waits for the transfer's end, on the thread.
"""

from __future__ import annotations

import asyncio
import struct
from importlib import metadata
from typing import Any, Final

from mooncake.engine import TransferEngine

from kvwire.memory.copy import address_of
from kvwire_certify.transport import End

_REFERENCE: Final = struct.Struct("<Q")
_WHEELS: Final = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)


def _version() -> str:
    """Return the version of the installed wheel."""
    for name in _WHEELS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


class MooncakeEnd(End):
    """An engine, which finds the other end's engine by its address."""

    version: str = _version()

    async def open(self, memory: memoryview) -> bytes:
        self.engine: Any = TransferEngine()
        _check(self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "start")
        self.offered: dict[bytes, int] = {}
        return b"127.0.0.1:%d" % self.engine.get_rpc_port()

    async def offer(self, data: memoryview) -> bytes:
        address = address_of(data)
        _check(self.engine.register_memory(address, len(data)), "register_memory")
        reference = _REFERENCE.pack(address)
        self.offered[reference] = address
        return reference

    async def withdraw(self, reference: bytes) -> None:
        address = self.offered.pop(reference)
        _check(self.engine.unregister_memory(address), "unregister_memory")

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        call = self.engine.transfer_sync_read
        return await self.moved(call, reference, into, timeout_s)

    async def put(
        self, reference: bytes, data: memoryview, timeout_s: float | None
    ) -> bool:
        call = self.engine.transfer_sync_write
        return await self.moved(call, reference, data, timeout_s)

    async def moved(
        self, call: Any, reference: bytes, memory: memoryview, timeout_s: float | None
    ) -> bool:
        (theirs,) = _REFERENCE.unpack(reference)
        mine = address_of(memory)
        _check(self.engine.register_memory(mine, len(memory)), "register_memory")
        work = asyncio.ensure_future(
            asyncio.to_thread(call, self.peer.decode(), mine, theirs, len(memory))
        )
        try:
            done, _ = await asyncio.wait([work], timeout=timeout_s)
            if not done:
                raise TimeoutError
        finally:
            await asyncio.wait([work])
            self.engine.unregister_memory(mine)
        _check(work.result(), "transfer")
        return True

    async def close(self) -> None:
        for address in self.offered.values():
            self.engine.unregister_memory(address)
        self.engine = None


def _check(status: int, what: str) -> None:
    if status:
        raise OSError(f"{what}: status {status}")


TARGET = MooncakeEnd
