"""A peer in a process of its own, which a test can kill, stop and continue.

Whose module it runs connects, says that it is there, and receives until the connection
ends. The last line it prints is how that was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

from kvwire import Communicator, Connection, KVWireError
from tests.support.tree import ROOT


class Child:
    """The parent's side of it."""

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
async def started(
    comm: Communicator, module: str, *arguments: object
) -> AsyncIterator[Child]:
    """Run a module that connects to a communicator."""
    address = await comm.listen("127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, str(address), *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        connection = await comm.accept()
        await connection.recv(1)
        yield Child(process, connection)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def stay(connection: Connection, tag: int = 1) -> None:
    """The child's part: say that it is there, receive, and print the end."""
    await connection.send(1, b"here")
    try:
        while True:
            await connection.recv(tag)
    except KVWireError as exc:
        print(type(exc).__name__)
