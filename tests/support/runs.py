"""Programs that a test runs: to their end, or beside it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TypeVar

from tests.support.tree import ROOT
from tests.support.waiting import PATIENCE_S

# What they take at most, on a machine that is busy with something else.
ENDS_WITHIN_S = 300.0


def ran(
    *command: str | Path,
    check: bool = False,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = ENDS_WITHIN_S,
) -> subprocess.CompletedProcess[str]:
    """A program that has ended, with all that it has printed."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=check,
        cwd=cwd,
        env=env,
        timeout=timeout,
    )


def python(
    *arguments: str | Path,
    check: bool = False,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = ENDS_WITHIN_S,
) -> subprocess.CompletedProcess[str]:
    """The same of a process of this Python."""
    command = (sys.executable, *arguments)
    return ran(*command, check=check, cwd=cwd, env=env, timeout=timeout)


class Beside:
    """A process that goes on while a test does: it prints lines, and may read some."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def line(self) -> str:
        """The next line it prints, or logs where that is read."""
        reader = self._process.stdout or self._process.stderr
        assert reader is not None
        async with asyncio.timeout(PATIENCE_S):
            line = await reader.readline()
        assert line, "the process has ended"
        return line.decode().strip()

    def write(self, line: str) -> None:
        """Have it read a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    async def do(self, line: str) -> str:
        """Have it read a line; what it prints then."""
        self.write(line)
        return await self.line()

    def signal(self, number: signal.Signals) -> None:
        """Kill, stop or continue it."""
        self._process.send_signal(number)

    async def wait(self) -> int:
        """Its status, once it has ended."""
        return await self._process.wait()

    async def last_words(self) -> str:
        """What it still prints, until its end; "" if it was killed."""
        said, _ = await self._process.communicate()
        return said.decode().strip()


B = TypeVar("B", bound=Beside)


@contextlib.asynccontextmanager
async def beside(
    *arguments: str,
    kind: type[B],
    reads: bool = False,
    logs: bool = False,
    under: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[B]:
    """Run this Python with some arguments, and kill it at the end.

    Args:
        *arguments: Such as ``-m`` and a module.
        kind: What the test has of it.
        reads: Whether it is told something, line by line.
        logs: Whether its log is read, and not what it prints.
        under: A command that runs it.
        env: Its environment; None for that of the tests.
    """
    process = await asyncio.create_subprocess_exec(
        *(*under, sys.executable, *arguments),
        stdin=PIPE if reads else None,
        stdout=None if logs else PIPE,
        stderr=PIPE if logs else None,
        cwd=ROOT,
        env=env,
    )
    try:
        yield kind(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


# An interpreter in which a package cannot be found, whatever is installed.
WITHOUT = """\
import sys
from importlib import import_module
for line in sys.argv[1:]:
    hidden, module, *names = line.split()
    sys.modules[hidden] = None
    try:
        for name in names or ["__doc__"]:
            getattr(import_module(module), name)
    except ModuleNotFoundError as exc:
        print(exc)
"""
