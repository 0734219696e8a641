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
    # Its first line.
    said: str

    @property
    def where(self) -> str:
        return f"kvwire://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self.process.returncode is None

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
        said = (await process.stderr.readline()).decode()
        assert "serving" in said, said + (await process.stderr.read()).decode()
        address = said.partition(" on ")[2].partition(";")[0]
        yield ServerProcess(process, int(address.rpartition(":")[2]), said)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
