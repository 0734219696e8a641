"""Connections made anew: the handshake, the first transfer on them, and the second."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from typing import Any, Final

import numpy as np

import kvwire
from kvwire.cli.bench.case import Work
from kvwire.cli.bench.sides.half import HOST, ConnectedHalf, Half, digest, fill, over
from kvwire.limits import KIB

COLUMNS: Final = ("handshake", "first transfer", "second transfer")
# A prompt of one block, in 16 layers of 4 KiB.
TRANSFER_BYTES: Final = 64 * KIB
_LAYERS: Final = 16
_TOKENS: Final = 16
_DIMS: Final = TRANSFER_BYTES // _LAYERS // (2 * _TOKENS * 2)
_ONLY_BLOCK: Final = [0]


class _Anew(Half):
    """Half of a pair that makes a connection for each sample."""

    async def accept(self) -> dict[str, Any]:
        """See Half; connections are made in each round."""
        return {}

    async def drive(self, work: Work) -> dict[str, Any]:
        """Left: ``values`` are seconds of what ``work.verb`` names, by connection."""
        column = COLUMNS.index(work.verb)
        return {"values": [(await self._once())[column] for _ in range(work.count)]}

    @abstractmethod
    async def _once(self) -> tuple[float, float, float]:
        """One connection; seconds by column."""


class SetupHalf(_Anew, ConnectedHalf):
    """``work.count`` connections, each with two transfers that the left side pulls.

    Args:
        transport: Its name.
    """

    def __init__(self, transport: str) -> None:
        super().__init__(transport)
        self._address = ""
        self._memory = np.ones(TRANSFER_BYTES, np.uint8)
        spec = kvwire.KVSpec(
            layers=_LAYERS,
            kv_heads=1,
            head_dim=_DIMS,
            block_tokens=_TOKENS,
            dtype="float16",
        )
        shape = (_LAYERS, 1, 2, _TOKENS, 1, _DIMS)
        tensors = list(self._memory.view(np.float16).reshape(shape))
        self._cache = kvwire.PagedCache(spec, tensors)

    async def connect(self, address: Any) -> dict[str, Any]:
        """See Half."""
        facts = await super().connect(address)
        await self._connection.close()
        self._address = address
        return facts

    async def check_left(self, work: Work) -> dict[str, Any]:
        """See Half."""
        self._memory[:] = 0
        await self.drive(work)
        return {"digest": digest(self._memory.data)}

    async def check_right(self, work: Work) -> dict[str, Any]:
        """See Half."""
        sent = fill(self._memory.data)
        await self.serve(work)
        return {"digest": sent}

    async def serve(self, work: Work) -> dict[str, Any]:
        """Right: everything is published before it is pulled."""
        outgoing = []
        for _ in range(2 * work.count):
            outgoing.append(self._communicator.publish(*self._next()))
            outgoing[-1].ready()
            outgoing[-1].finish()
        for end in outgoing:
            await over(end)
        return {}

    async def _once(self) -> tuple[float, float, float]:
        clock = time.perf_counter
        began = clock()
        connection = await self._communicator.connect(
            self._address, transport=self._transport
        )
        connected = clock()
        await self._pull(connection)
        first = clock()
        await self._pull(connection)
        second = clock()
        await connection.close()
        return connected - began, first - connected, second - first

    async def _pull(self, connection: kvwire.Connection) -> None:
        await over(connection.pull(*self._next()))

    def _next(self) -> tuple[int, kvwire.PagedCache, list[int]]:
        """Both sides count alike."""
        self._number += 1
        return self._number, self._cache, _ONLY_BLOCK


class StreamsSetupHalf(_Anew):
    """The streams of asyncio: a connection, and a byte that is answered with as many.

    What cannot be less: no handshake above that of TCP, no plan, no checksum.
    """

    _server: asyncio.Server
    _address: int

    async def listen(self) -> dict[str, Any]:
        """See Half."""
        self._server = await asyncio.start_server(self._answer, HOST, 0)
        return {"address": self._server.sockets[0].getsockname()[1]}

    async def connect(self, address: Any) -> dict[str, Any]:
        """See Half."""
        self._address = address
        return {}

    async def check_left(self, work: Work) -> dict[str, Any]:
        """See Half."""
        await self.drive(work)
        return {"digest": digest(bytes(TRANSFER_BYTES))}

    async def check_right(self, work: Work) -> dict[str, Any]:
        """See Half."""
        return {"digest": digest(bytes(TRANSFER_BYTES))}

    async def serve(self, work: Work) -> dict[str, Any]:
        """See Half; the server answers by itself."""
        return {}

    async def close(self) -> None:
        """See Half."""
        if hasattr(self, "_server"):
            self._server.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while await reader.read(1):
            writer.write(bytes(TRANSFER_BYTES))
        writer.close()

    async def _once(self) -> tuple[float, float, float]:
        clock = time.perf_counter
        times = [clock()]
        reader, writer = await asyncio.open_connection(HOST, self._address)
        times.append(clock())
        for _ in range(2):
            writer.write(b"!")
            await reader.readexactly(TRANSFER_BYTES)
            times.append(clock())
        writer.close()
        await writer.wait_closed()
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]
