"""A side's line to the process that runs the benchmark, one JSON value at a time.

Each side says first what the other one needs and what it consists of. Then, for each
round, the right side gets ready and says so, with what the left one needs of it; the
left side does the work and answers with its seconds; and the right side, told that it
is over, answers as well. Between rounds both wait.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Protocol, TypeVar

import msgspec

from kvwire.config import converted
from kvwire_certify.bench.work import Work

HOST: Final = "127.0.0.1"
Seconds = Sequence[float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """One round's work; ``offer`` is the right side's description of it."""

    work: Work
    # Whether bytes are random, and compared.
    checks: bool = False
    offer: Any = None


class Line(Protocol):
    """Carries values between one side and the process that directs both."""

    async def send(self, value: object) -> None:
        """Send a value."""

    async def receive(self) -> Any:
        """Return the next value.

        Raises:
            EOFError: There are no more.
        """


class SocketLine:
    """A line over a connected socket."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, value: object) -> None:
        """Send a value."""
        self._writer.write(msgspec.json.encode(value) + b"\n")
        await self._writer.drain()

    async def receive(self) -> Any:
        """Return the next value.

        Raises:
            EOFError: There are no more.
        """
        with suppress(OSError):
            if line := await self._reader.readline():
                return msgspec.json.decode(line)
        raise EOFError("the benchmark has ended")


async def turns(line: Line) -> AsyncIterator[Turn]:
    """Yield each round as it is asked for."""
    with suppress(EOFError):
        while True:
            yield converted(await line.receive(), Turn)


Program = Callable[[Line, dict[str, Any]], Coroutine[Any, Any, None]]


def name_of(program: Program) -> str:
    """Return a program's name, by which another process finds it."""
    return f"{program.__module__}:{program.__qualname__}"


def main() -> None:
    """Run one side until its line, the standard input, ends: ``PROGRAM OPTIONS``."""
    # Ctrl-C reaches every process of a terminal; this one ends with its line.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, _, name = sys.argv[1].partition(":")
    options: dict[str, Any] = json.loads(sys.argv[2])
    program: Program = getattr(import_module(module), name)

    async def play() -> None:
        sock = socket.socket(fileno=os.dup(0))
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=1 << 24)
        line = SocketLine(reader, writer)
        try:
            await program(line, options)
        except Exception as exc:  # noqa: BLE001 - the other process reports it
            with suppress(OSError):
                await line.send({"error": f"{type(exc).__name__}: {exc}"})
        writer.close()

    if options.get("loop") == "uvloop":
        import uvloop  # noqa: PLC0415 - not on every platform

        uvloop.run(play())
    else:
        asyncio.run(play())


async def each_timed(
    count: int,
    once: Callable[[int], Awaitable[T]],
    after: Callable[[T], Awaitable[object]] | None = None,
) -> list[float]:
    """Return the seconds of each call of ``once``; ``after`` is not timed."""
    clock = time.perf_counter
    seconds = []
    for number in range(count):
        began = clock()
        found = await once(number)
        seconds.append(clock() - began)
        if after is not None:
            await after(found)
    return seconds
