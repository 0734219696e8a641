"""NIXL's agent with the UCX plug-in of its wheel.

An offer registers and describes its memory, and withdrawing deregisters it. NIXL has no
call that waits, so the adapter polls a transfer every half millisecond. A cancelled
transfer is released; by NIXL's documentation this ends it. Only the compiled module is
used: the Python code above it needs torch.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import struct
import uuid
from importlib import metadata
from typing import Any, Final

import numpy as np

from kvwire.memory.copy import address_of
from kvwire_certify.transport import End

_WHEEL: Final = "nixl-cu12"
_REFERENCE: Final = struct.Struct("<QQ")
_POLL_S: Final = 0.0005
# The wheel contains copies of these libraries, and the process crashes if the system's
# are loaded second.
for _name in ("libnl-3.so.200", "libnl-route-3.so.200"):
    try:
        ctypes.CDLL(_name)
    except OSError:
        continue
_NIXL: Final = importlib.import_module(f"{_WHEEL.replace('-', '_')}._bindings")


def _rows(address: int, nbytes: int) -> Any:
    return np.array([[address, nbytes, 0]], np.uint64)


class NixlEnd(End):
    """A NIXL agent."""

    version: str = metadata.version(_WHEEL)

    async def open(self, memory: memoryview) -> bytes:
        config = _NIXL.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        self.agent: Any = _NIXL.nixlAgent(uuid.uuid4().hex, config)
        self.plugin: list[Any] = [self.agent.createBackend("UCX", {})]
        self.offered: dict[bytes, Any] = {}
        self.own: Any = _NIXL.nixlRegDList(
            _NIXL.DRAM_SEG, _rows(address_of(memory), len(memory))
        )
        self.agent.registerMem(self.own, self.plugin)
        return bytes(self.agent.getLocalMD())

    async def connect(self, peer: bytes) -> None:
        self.remote: str = self.agent.loadRemoteMD(peer).decode()

    async def offer(self, data: memoryview) -> bytes:
        rows = _rows(address_of(data), len(data))
        region = _NIXL.nixlRegDList(_NIXL.DRAM_SEG, rows)
        self.agent.registerMem(region, self.plugin)
        said = bytes(self.agent.getLocalPartialMD(region, True, self.plugin))
        reference = _REFERENCE.pack(address_of(data), len(data)) + said
        self.offered[reference] = region
        return reference

    async def withdraw(self, reference: bytes) -> None:
        self.agent.deregisterMem(self.offered.pop(reference), self.plugin)

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool:
        return await self.moved(_NIXL.NIXL_READ, reference, into, timeout_s)

    async def put(
        self, reference: bytes, data: memoryview, timeout_s: float | None
    ) -> bool:
        return await self.moved(_NIXL.NIXL_WRITE, reference, data, timeout_s)

    async def moved(
        self, verb: Any, reference: bytes, mine: memoryview, timeout_s: float | None
    ) -> bool:
        theirs, nbytes = _REFERENCE.unpack_from(reference)
        self.agent.loadRemoteMD(reference[_REFERENCE.size :])
        here = _NIXL.nixlXferDList(_NIXL.DRAM_SEG, _rows(address_of(mine), nbytes))
        there = _NIXL.nixlXferDList(_NIXL.DRAM_SEG, _rows(theirs, nbytes))
        handle = self.agent.createXferReq(
            verb, here, there, self.remote, b"", self.plugin
        )
        try:
            async with asyncio.timeout(timeout_s):
                state = self.agent.postXferReq(handle, b"")
                while state != _NIXL.NIXL_SUCCESS:
                    await asyncio.sleep(_POLL_S)
                    state = self.agent.getXferStatus(handle)
        finally:
            self.agent.releaseXferReq(handle)
        return True

    async def close(self) -> None:
        for region in [self.own, *self.offered.values()]:
            self.agent.deregisterMem(region, self.plugin)
        self.agent = None


TARGET = NixlEnd
