"""The frame of a benchmark program: one coroutine that both processes run.

A *program* is a coroutine function that takes a :class:`Bench`. Both processes run the
same program: the left one begins every operation and measures the time, the right one
is the other end. The frame gives both the same work::

    async def copies(b: Bench) -> None:
        async for work in b.works(Work):
            async with b.clock():
                seconds = await each_timed(work.count, copy)
            await b.report(seconds)

The left process gets its work from the process that runs the benchmark, and passes it
to the right one, which may be on another host. They exchange only JSON: work, values
that the programs exchange, times, and errors.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvwire import KVWireError
from kvwire.cli.bench.limits import BENCH_CALL_BYTES_MAX, BENCH_IN_FLIGHT_MAX

HOST: Final = "127.0.0.1"
# A side's report when the other one has ended without an error of its own.
GONE: Final = "the other side has ended"
_DIGEST_BYTES: Final = 16
# A side that fails first waits this long for the other side's error, the likely cause.
_CAUSE_S: Final = 1.0

Bytes = npt.NDArray[np.uint8]
# Checked when a work comes from another process.
Positive = Annotated[int, msgspec.Meta(ge=1)]


class BenchError(KVWireError):
    """Reports a benchmark that could not run, or bytes that arrived damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A contender's work in one round of a case: ``count`` operations.

    Up to ``in_flight`` of them run at a time.
    """

    verb: str
    nbytes: Positive
    count: Positive
    in_flight: Annotated[int, msgspec.Meta(ge=1, le=BENCH_IN_FLIGHT_MAX)] = 1

    @property
    def moved_bytes(self) -> int:
        """The bytes that a round moves."""
        return self.nbytes * self.count


W = TypeVar("W", bound=Work)
C = TypeVar("C")
Seconds = Sequence[float]


@dataclass(frozen=True, slots=True)
class Sample:
    """One round: the measured times, and the CPU seconds of each side."""

    seconds: Seconds
    cpu_s: Seconds
    # How the received bytes differ from the sent ones; "" if they are equal.
    damage: str = ""
    # Other figures that a program measures, for each side.
    more: Sequence[Any] = ()


class Channel:
    """Carries JSON values in both directions between two processes, one per line."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, sock: socket.socket) -> Channel:
        """Make a channel from a connected socket, which the channel will close."""
        return cls(
            *await asyncio.open_unix_connection(sock=sock, limit=BENCH_CALL_BYTES_MAX)
        )

    async def send(self, value: object) -> None:
        """Send a value."""
        self._writer.write(msgspec.json.encode(value) + b"\n")
        await self._writer.drain()

    async def receive(self) -> Any:
        """Wait for the next value.

        Raises:
            EOFError: The other process has ended.
        """
        with suppress(OSError):  # it was killed
            if line := await self._reader.readline():
                return msgspec.json.decode(line)
        raise EOFError(GONE)

    async def close(self) -> None:
        """Close the socket once all data is sent; never raises."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()


class Bench:
    """Connects a program with its other side, and with the reader of its results.

    Attributes:
        left: Whether this side begins the operations and measures the time.
        options: The contender's options.
        control: The channel on which the left side gets work and reports results.
        facts: Facts about this side for the JSON document.
        checks: Whether this round's bytes are random, and compared.
        cpu_s: Returns the CPU seconds that this side has used.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        left: bool = True,
        control: Channel | None = None,
    ) -> None:
        self.left = left
        self.options = options
        self.control = control
        self.facts: dict[str, Any] = {}
        self.checks: bool = False
        self.cpu_s: Callable[[], float] = time.process_time
        self._other: Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        # With room for one: the peer keeps anything that it wants to send earlier.
        self._inbox: asyncio.Queue[Any] = asyncio.Queue(1)
        self._gone: asyncio.Future[Exception] = asyncio.Future()
        self._greeted = False
        self._used_s = 0.0

    # --- the other side ---------------------------------------------------------------

    def meet(self, other: Channel) -> None:
        """Start reading the other side's messages; if it ends, so does this program."""
        self._other = other
        self._reading = asyncio.ensure_future(self._read(other))

    async def send(self, value: object = None) -> None:
        """Send a value to the program of the other side."""
        assert self._other is not None, "this side runs alone"
        await self._other.send(value)

    async def receive(self) -> Any:
        """Wait for the next value that the program of the other side sends."""
        return await self._inbox.get()

    async def _read(self, other: Channel) -> None:
        try:
            while True:
                found = await other.receive()
                if isinstance(found, dict) and "error" in found:
                    raise BenchError(f"the other side failed: {found['error']}")
                await self._inbox.put(found)
        except Exception as exc:  # noqa: BLE001 - run() raises it
            self._gone.set_result(exc)

    # --- rounds -----------------------------------------------------------------------

    async def works(self, kind: type[W]) -> AsyncIterator[W]:
        """Yield each round's work as it arrives."""
        while asked := await self.asked():
            work = msgspec.convert(asked["work"], kind)
            self.admit(work)
            self.checks = bool(asked["checks"])
            if self.left and self._other is not None:
                await self._other.send(asked)
            yield work

    async def asked(self) -> Any:
        """Wait for the next request for a round; return None after the last."""
        if not self.left:
            return await self.receive()
        assert self.control is not None
        if not self._greeted:
            self._greeted = True
            await self.control.send({"facts": self.facts})
        try:
            return await self.control.receive()
        except EOFError:
            return None

    def admit(self, work: Any) -> None:
        """Raise if this side must refuse a work."""

    @asynccontextmanager
    async def clock(self) -> AsyncIterator[None]:
        """Measure the CPU time of a round; both sides leave it after the left is done.

        Both sides do their part of the work inside the block.
        """
        began_s = self.cpu_s()
        yield
        if not self.left:
            await self.receive()
        self._used_s = self.cpu_s() - began_s
        if self.left and self._other is not None:
            await self._other.send(None)

    async def report(
        self, seconds: Seconds = (), digest: str = "", more: object = None
    ) -> None:
        """Report a round's results; both sides call this at its end.

        Args:
            seconds: All measured times, at the left side.
            digest: A digest of the moved bytes; the same at both sides.
            more: Other figures that a program measures, at each side.
        """
        if not self.left:
            await self.send([self._used_s, digest, more])
            return
        assert self.control is not None
        cpu_s = [self._used_s]
        damage = ""
        both = [more]
        if self._other is not None:
            its_cpu_s, its_digest, its_more = await self.receive()
            cpu_s.append(its_cpu_s)
            both.append(its_more)
            damage = difference(digest, its_digest)
        await self.control.send(Sample(seconds, cpu_s, damage, both))

    # --- the program ------------------------------------------------------------------

    async def run(self, program: Callable[[Bench], Awaitable[None]]) -> None:
        """Run a program until it returns, fails, or its other side has gone.

        Raises:
            EOFError: The other side ended.
            BenchError: The other side failed; the text contains its report.
            Exception: The program failed.
        """
        running = asyncio.ensure_future(program(self))
        try:
            await asyncio.wait((running, self._gone), return_when="FIRST_COMPLETED")
            if running.done() and running.exception() and self._other is not None:
                await asyncio.wait((self._gone,), timeout=_CAUSE_S)
            if self._gone.done() and (not running.done() or running.exception()):
                raise self._gone.result()
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def play(self, program: Callable[[Bench], Awaitable[None]]) -> None:
        """Run a program; send its error to the process that waits for it."""
        try:
            await self.run(program)
        except Exception as exc:  # noqa: BLE001 - another process reports it
            listener = self.control or self._other
            if listener is not None and not (
                isinstance(exc, EOFError) and not self.left
            ):
                with suppress(OSError, KVWireError):
                    async with asyncio.timeout(_CAUSE_S):
                        await listener.send({"error": reason(exc)})
        finally:
            await self.close()

    async def close(self) -> None:
        """Close both channels."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        for channel in (self.control, self._other):
            if channel is not None:
                await channel.close()


Program = Callable[[Bench], Coroutine[Any, Any, None]]


class Drive(Protocol):
    """The function that requests a round from a left side in this process."""

    async def __call__(self, work: Work, *, checks: bool = False) -> Sample: ...


def reason(exc: Exception) -> str:
    """Return an error in one line, with its type unless it is a BenchError."""
    if isinstance(exc, BenchError) or str(exc) == GONE:
        return str(exc)
    return f"{type(exc).__name__}: {exc}"


def difference(left: str, right: str) -> str:
    """Return how the two sides' digests differ; "" if they are equal."""
    if left == right:
        return ""
    return f"the received bytes differ: {left} on the left, {right} on the right"


def found_in(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer of the left side.

    Raises:
        BenchError: The answer is an error.
    """
    if "error" in answer:
        raise BenchError(answer["error"])
    return answer


@asynccontextmanager
async def driven(
    b: Bench, program: Program
) -> AsyncIterator[tuple[dict[str, Any], Drive]]:
    """Run a left side in this process; yield its facts, and a function for rounds."""
    mine, its = socket.socketpair()
    control = await Channel.over(mine)
    b.control = await Channel.over(its)
    playing = asyncio.ensure_future(b.play(program))

    async def ask(work: Work, *, checks: bool = False) -> Sample:
        await control.send({"work": asdict(work), "checks": checks})
        return Sample(**found_in(await control.receive()))

    try:
        yield found_in(await control.receive())["facts"], ask
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await control.close()


# --- shared by programs ---------------------------------------------------------------


async def each_timed(
    count: int, once: Callable[[int], Awaitable[object]]
) -> list[float]:
    """Call ``once`` a number of times in a row; return the seconds of each call."""
    clock = time.perf_counter
    seconds = []
    for number in range(count):
        began = clock()
        await once(number)
        seconds.append(clock() - began)
    return seconds


async def setups_timed(
    count: int,
    connect: Callable[[], Awaitable[C]],
    transfer: Callable[[C], Awaitable[object]],
    close: Callable[[C], Awaitable[None]],
) -> list[float]:
    """Make connections; return the seconds of each, and of its first two transfers."""
    clock = time.perf_counter
    seconds = []
    for _ in range(count):
        times = [clock()]
        connection = await connect()
        times.append(clock())
        for _ in range(2):
            await transfer(connection)
            times.append(clock())
        await close(connection)
        seconds += np.diff(times).tolist()
    return seconds


def digest(data: bytes | bytearray | memoryview | Bytes) -> str:
    """Return a digest, which two sides compare instead of the bytes."""
    return hashlib.blake2b(
        np.frombuffer(data, np.uint8).data, digest_size=_DIGEST_BYTES
    ).hexdigest()


async def fill(memory: bytearray | memoryview | Bytes) -> None:
    """Fill memory with random bytes.

    This runs on a thread, because a loop that is blocked for long looks dead to the
    peer.
    """
    words = np.frombuffer(memory, np.uint8)

    def write() -> None:
        words[:] = np.random.default_rng().integers(0, 256, words.size, np.uint8)

    await asyncio.to_thread(write)


# --- the process ----------------------------------------------------------------------


def name_of(program: Program | str) -> str:
    """Return a program's name, by which another process finds it."""
    if isinstance(program, str):
        return program
    return f"{program.__module__}:{program.__qualname__}"


def main(text: str, first: socket.socket, other: socket.socket | None) -> None:
    """Run one side until it is done.

    Args:
        text: JSON with the ``program``, whether it is ``left``, and its ``options``.
        first: A socket to the process that runs the benchmark; for a right side, to the
            left one.
        other: A socket to the right side, for a left side that has one.
    """
    given = json.loads(text)
    module, _, name = given["program"].partition(":")
    program: Program = getattr(import_module(module), name)

    async def play() -> None:
        b = Bench(given["options"], left=given["left"])
        if b.left:
            b.control = await Channel.over(first)
            if other is not None:
                b.meet(await Channel.over(other))
        else:
            b.meet(await Channel.over(first))
        await b.play(program)

    run(play(), given["options"].get("loop", "asyncio"))


def run(main: Coroutine[Any, Any, None], loop: str) -> None:
    """Run a coroutine on asyncio's or uvloop's loop."""
    if loop == "uvloop":
        import uvloop  # noqa: PLC0415 - not on every platform

        uvloop.run(main)
    else:
        asyncio.run(main)
