"""A store server in a process of its own, which a test can kill, stop and continue."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tests.support.tree import ROOT


@dataclass(frozen=True, slots=True)
class ServerProcess:
    process: asyncio.subprocess.Process
    port: int
    # The line with its address, and what it has logged before that.
    said: str
    logged: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return f"kvwire://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    async def next_line(self) -> str:
        """What it logs next."""
        assert self.process.stderr is not None
        return (await self.process.stderr.readline()).decode()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextlib.asynccontextmanager
async def serving(*arguments: str, port: int = 0) -> AsyncIterator[ServerProcess]:
    """Run ``kvwire store serve`` with some arguments, and kill it at the end."""
    command = ("-m", "kvwire", "store", "serve", "--listen", f"127.0.0.1:{port}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *command, *arguments),
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        assert process.stderr is not None
        logged: list[str] = []
        while not (said := (await process.stderr.readline()).decode()).startswith(
            "serving"
        ):
            logged.append(said)
            assert said, logged
        address = said.partition(" on ")[2].partition(";")[0]
        yield ServerProcess(
            process, int(address.rpartition(":")[2]), said, tuple(logged)
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
