"""A peer in a process of its own, which a test can kill, stop and continue.

It connects, grants memory of its own, and receives until the connection ends. The last
line it prints is how that was.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import kvwire
from kvwire import Communicator, Connection, Grant, KVWireError
from tests.support.tree import ROOT

GRANTED_BYTES = 32 << 20


class Child:
    """The parent's side of it."""

    def __init__(
        self, process: asyncio.subprocess.Process, connection: Connection, grant: Grant
    ) -> None:
        self.connection = connection
        self.grant = grant
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
    """Start a peer that connects to a communicator, with the same configuration."""
    address = await comm.listen("127.0.0.1:0")
    config: dict[str, Any] = {
        "ping_interval_s": comm.config.ping_interval_s,
        "ping_misses": comm.config.ping_misses,
        "require": comm.config.require,
        "backends": dict(comm.config.backends),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(address), json.dumps(config)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        connection = await comm.accept()
        grant = Grant.from_bytes(await connection.recv(1))
        yield Child(process, connection, grant)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _main(address: str, config: dict[str, Any]) -> None:
    if "nixl" in config["require"]:
        _load_nixl()
    async with kvwire.open(name="child", **config) as comm:
        connection = await comm.connect(address)
        region = comm.register(bytearray(GRANTED_BYTES), "readwrite")
        await connection.send(1, region.grant(connection).to_bytes())
        try:
            while True:
                await connection.recv(1)
        except KVWireError as exc:
            print(type(exc).__name__)


def _load_nixl() -> None:
    from kvwire_nixl.library import NixlAgent
    from kvwire_nixl.settings import parse
    from kvwire_ucx.library import answer

    # Another UCX is in the process, as behind any look at all transports; NIXL must not
    # call that in the place of its own.
    answer()
    # Its first agent takes a process longer than a lane may on a busy machine.
    NixlAgent(parse({}), "first").close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], json.loads(sys.argv[2])))
