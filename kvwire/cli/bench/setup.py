"""``kvwire bench setup``: from nothing to a connection, and to the first transfer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvwire.cli.bench.bare import StreamsSide
from kvwire.cli.bench.operations import SETUP, OpsSide, OpsWork
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.report import COMMON, Common, Rounds, require_known
from kvwire.cli.bench.side import HOST
from kvwire.cli.bench.turns import MICROSECONDS, Benchmark, Case, CaseResult, Findings
from kvwire.limits import KIB
from kvwire.types import in_bytes

# What a round makes of each.
CONNECTIONS: Final = 20
COLUMNS: Final = ("handshake", "first transfer", "second transfer")
# A prompt of one block, in 16 layers of 4 KiB.
TRANSFER_BYTES: Final = 64 * KIB
_LAYERS: Final = 16


class BareSetupSide(StreamsSide):
    """Connects by streams of asyncio, and has a byte answered with as many.

    What cannot be less: no handshake above that of TCP, no plan, no checksum.
    """

    async def drive(self, work: OpsWork) -> Sequence[float]:
        clock, seconds = time.perf_counter, []
        for _ in range(work.count):
            times = [clock()]
            reader, writer = await asyncio.open_connection(HOST, self.port)
            times.append(clock())
            for _ in COLUMNS[1:]:
                writer.write(b"!")
                await reader.readexactly(TRANSFER_BYTES)
                times.append(clock())
            writer.close()
            await writer.wait_closed()
            seconds += np.diff(times).tolist()
        return seconds

    async def digest(self, work: OpsWork) -> str:
        return ""

    async def answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while await reader.read(1):
            writer.write(bytes(TRANSFER_BYTES))
        writer.close()


def by_column(found: CaseResult) -> Findings:
    """Make a row of each thing that is timed."""

    def row(at: int, name: str) -> CaseResult:
        whole = f"{found.case.name} {name}"
        return found.part(whole, lambda seconds: seconds[at :: len(COLUMNS)])

    return [row(at, name) for at, name in enumerate(COLUMNS)]


def command(
    *,
    transport: str = "tcp",
    rounds: Rounds = 5,
    common: Common = COMMON,
) -> int:
    """Measure the handshake of a connection, its first transfer and its second.

    Args:
        transport: Of kvwire, separated by commas; those that join two processes.
        rounds: How often 20 connections are made by everybody.
        common: Options of every benchmark.
    """
    transports = transport.split(",")
    require_known(transports)
    loop = {"loop": common.loop}
    work = OpsWork(verb=SETUP, nbytes=TRANSFER_BYTES, count=CONNECTIONS, layers=_LAYERS)
    streams = Contender(f"{common.loop} streams", BareSetupSide, options=loop)
    benchmark = Benchmark(
        name="setup",
        cases=[
            Case(
                name=name,
                work=work,
                unit=MICROSECONDS,
                ours=[
                    Contender(
                        f"kvwire {name}", OpsSide, options={"transport": name, **loop}
                    )
                ],
                beside=[streams],
                tail=True,
            )
            for name in transports
        ],
        notes=[
            f"A transfer is a pull of one block, {in_bytes(TRANSFER_BYTES)}.",
            "The streams connect and send as many bytes, and nothing else.",
        ],
        split=by_column,
    )
    return common.run(benchmark, transport=transports, rounds=rounds)
