"""A peer in a process of its own, with its data over UCX.

It connects, says that it is there, and then receives what comes with tag 1, or does
nothing, until the connection ends. The last line it prints is how that was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import kvwire
from kvwire import Communicator, Connection, KVWireError

_ROOT = Path(__file__).resolve().parents[3]


class Child:
    """The parent's side of it.

    Attributes:
        connection: The connection to it.
        process: Itself.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, connection: Connection
    ) -> None:
        self.connection = connection
        self.process = process

    def signal(self, number: signal.Signals) -> None:
        """Kill, stop or continue it."""
        os.kill(self.process.pid, number)

    async def last_words(self) -> str:
        """How its connection ended, as it saw it; "" if it was killed."""
        said, _ = await self.process.communicate()
        return said.decode().strip()


@contextlib.asynccontextmanager
async def child(comm: Communicator, manner: str = "receive") -> AsyncIterator[Child]:
    """Start a peer that connects to a communicator, with the same configuration."""
    address = await comm.listen("127.0.0.1:0")
    config = comm.config
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.backends.kvwire_ucx.child", manner, str(address)),
        *(config.backends["ucx"]["TLS"], str(config.ping_interval_s)),
        stdout=asyncio.subprocess.PIPE,
        cwd=_ROOT,
    )
    try:
        connection = await comm.accept()
        await connection.recv(1)
        yield Child(process, connection)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _main(manner: str, address: str, tls: str, ping_interval_s: float) -> None:
    async with kvwire.open(
        name="child", ping_interval_s=ping_interval_s, backends={"ucx": {"TLS": tls}}
    ) as comm:
        connection = await comm.connect(address, transport="ucx")
        await connection.send(1, b"here")
        try:
            while True:
                await connection.recv(1 if manner == "receive" else 9)
        except KVWireError as exc:
            print(type(exc).__name__)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])))
