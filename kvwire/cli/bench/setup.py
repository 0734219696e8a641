"""``kvwire bench setup``: from nothing to a connection, and to the first transfer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from kvwire.cli.bench.messages import StreamsSide
from kvwire.cli.bench.pair import Contender, Work
from kvwire.cli.bench.report import COMMON, Common, Rounds, require_known, size_name
from kvwire.cli.bench.side import (
    HOST,
    ConnectedSide,
    digest,
    fill,
    mark_all,
    over,
    paged,
)
from kvwire.cli.bench.turns import MICROSECONDS, Benchmark, Case
from kvwire.limits import KIB

# What a round makes of each.
CONNECTIONS: Final = 20
COLUMNS: Final = ("handshake", "first transfer", "second transfer")
# A prompt of one block, in 16 layers of 4 KiB.
TRANSFER_BYTES: Final = 64 * KIB
_LAYERS: Final = 16


class SetupSide(ConnectedSide[Work]):
    """``work.count`` connections, each with two transfers that the left side pulls."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._memory = np.ones(TRANSFER_BYTES, np.uint8)
        self._cache = paged(self._memory, _LAYERS, 1)

    async def connect(self, address: Any) -> dict[str, Any]:
        facts = await super().connect(address)
        await self.connection.close()
        return facts

    async def fill(self, work: Work) -> None:
        await fill(self._memory)

    async def digest(self, work: Work) -> str:
        return digest(self._memory)

    async def drive(self, work: Work) -> dict[str, Any]:
        column = COLUMNS.index(work.verb)
        return {"values": [(await self._once())[column] for _ in range(work.count)]}

    async def serve(self, work: Work) -> dict[str, Any]:
        """Publish everything before it is pulled."""
        ids = [self.next_id() for _ in range(2 * work.count)]
        publish = self.communicator.publish
        for end in [mark_all(publish(id, self._cache, [0])) for id in ids]:
            await over(end)
        return {}

    async def _once(self) -> list[float]:
        times = [time.perf_counter()]
        connection = await self.one_more()
        times.append(time.perf_counter())
        for _ in range(2):
            await over(connection.pull(self.next_id(), self._cache, [0]))
            times.append(time.perf_counter())
        await connection.close()
        return np.diff(times).tolist()


class BareSetupSide(StreamsSide):
    """The streams of asyncio: a connection, and a byte that is answered with as many.

    What cannot be less: no handshake above that of TCP, no plan, no checksum.
    """

    _port: int

    async def accept(self) -> None:
        """Nothing: connections are made in each round."""

    async def connect(self, address: Any) -> dict[str, Any]:
        self._port = address
        return {}

    async def fill(self, work: Work) -> None:
        """Nothing: its bytes are zeros."""

    async def serve(self, work: Work) -> dict[str, Any]:
        return {}

    async def drive(self, work: Work) -> dict[str, Any]:
        column = COLUMNS.index(work.verb)
        return {"values": [(await self._once())[column] for _ in range(work.count)]}

    async def take(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while await reader.read(1):
            writer.write(bytes(TRANSFER_BYTES))
        writer.close()

    async def _once(self) -> list[float]:
        times = [time.perf_counter()]
        reader, writer = await asyncio.open_connection(HOST, self._port)
        times.append(time.perf_counter())
        for _ in range(2):
            writer.write(b"!")
            await reader.readexactly(TRANSFER_BYTES)
            times.append(time.perf_counter())
        writer.close()
        await writer.wait_closed()
        return np.diff(times).tolist()


def setup(*, transports: Sequence[str], loop: str) -> Benchmark:
    """Make the benchmark.

    Raises:
        UsageError: A transport that nobody knows.
    """
    require_known(transports)
    streams = Contender(f"{loop} streams", BareSetupSide, loop=loop)
    pairs = {
        name: Contender(f"kvwire {name}", SetupSide, transport=name, loop=loop)
        for name in transports
    }
    return Benchmark(
        name="setup",
        cases=[
            Case(
                name=f"{name} {column}",
                work=Work(verb=column, nbytes=TRANSFER_BYTES, count=CONNECTIONS),
                unit=MICROSECONDS,
                contenders=[pair, streams],
                tail=True,
            )
            for column in COLUMNS
            for name, pair in pairs.items()
        ],
        notes=[
            f"A transfer is a pull of one block, {size_name(TRANSFER_BYTES)}.",
            "The streams connect and send as many bytes, and nothing else.",
        ],
    )


def command(
    *,
    transport: str = "tcp",
    rounds: Rounds = 5,
    common: Common = COMMON,
) -> None:
    """The handshake of a connection, its first transfer and its second.

    Args:
        transport: Of kvwire, separated by commas; those that join two processes.
        rounds: How often 20 connections are made by everybody.
        common: Options of every benchmark.
    """
    transports = transport.split(",")
    benchmark = setup(transports=transports, loop=common.loop)
    common.run(benchmark, {"transport": transports, "rounds": rounds})
