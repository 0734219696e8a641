"""A peer in a process of its own, which a test can kill, stop and continue.

It connects, says that it is there, and receives whatever comes with tag 1 until the
connection ends. The last line it prints is how that was.
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

_ROOT = Path(__file__).resolve().parents[2]


class Child:
    """The parent's side of it.

    Attributes:
        connection: The connection to it.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, connection: Connection
    ) -> None:
        self.connection = connection
        self._process = process

    def signal(self, number: signal.Signals) -> None:
        """Kill, stop or continue it."""
        os.kill(self._process.pid, number)

    async def last_words(self) -> str:
        """How its connection ended, as it saw it; "" if it was killed."""
        said, _ = await self._process.communicate()
        return said.decode().strip()


@contextlib.asynccontextmanager
async def child(comm: Communicator) -> AsyncIterator[Child]:
    """Start a peer that connects to a communicator, with the same pings."""
    address = await comm.listen("127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.fault.child", str(address)),
        *(str(comm.config.ping_interval_s), str(comm.config.ping_misses)),
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


async def _main(address: str, ping_interval_s: float, ping_misses: int) -> None:
    async with kvwire.open(
        name="child", ping_interval_s=ping_interval_s, ping_misses=ping_misses
    ) as comm:
        connection = await comm.connect(address)
        await connection.send(1, b"here")
        try:
            while True:
                await connection.recv(1)
        except KVWireError as exc:
            print(type(exc).__name__)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
