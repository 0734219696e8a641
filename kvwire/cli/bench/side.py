"""One side of a contender: a process that does what it is told, in lines of JSON.

Which side it is, is said as ``module:class``, with options as ``KEY=VALUE``. It ends
with its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, ClassVar, Final, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvwire.cli.bench.limits import BENCH_IN_FLIGHT_MAX

HOST: Final = "127.0.0.1"
_DIGEST_BYTES: Final = 16

Bytes = npt.NDArray[np.uint8]
# Checked where a work comes from another process.
Positive = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Describes what every contender of a case does in a round: ``count`` operations.

    So many ``in_flight`` are begun before the first of them has to be over.
    """

    verb: str
    nbytes: Positive
    count: Positive
    in_flight: Annotated[int, msgspec.Meta(ge=1, le=BENCH_IN_FLIGHT_MAX)] = 1

    @property
    def moved_bytes(self) -> int:
        """Count the bytes of a round."""
        return self.nbytes * self.count


W = TypeVar("W", bound=Work)
C = TypeVar("C")


class BenchSide(Generic[W]):
    """Runs one side: the left one drives and keeps the time, the right one serves.

    The order of calls is listen, accept and connect; then any number of rounds. A round
    is prepare and use, drive and serve at the same time, and verify; before the first
    one of a work there is one more, with fill before and digest after it. Only drive
    and serve are timed.

    Attributes:
        opened: What is closed with the side.
        memory: What a work moves, of a side that has all of it in one piece.
    """

    work_type: ClassVar[type[Work]] = Work

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options
        self.opened: AsyncExitStack = AsyncExitStack()
        self.memory: Bytes = np.zeros(0, np.uint8)

    def check(self, work: W) -> None:
        """Raise if a work must not be done."""

    async def listen(self) -> Any:
        """Right: begin to listen; the answer is where."""

    async def accept(self) -> None:
        """Right: wait for the left one."""

    async def connect(self, address: Any) -> dict[str, Any]:
        """Left: connect to it; the answer is facts for the JSON document."""
        return {}

    async def prepare(self, work: W) -> Any:
        """Right: get ready; the answer is given to :meth:`use`."""

    async def use(self, work: W, given: Any) -> None:
        """Left: get ready."""

    async def fill(self, work: W) -> None:
        """Have random bytes in the memory of a work, which the next round replaces."""
        await fill(self.memory)

    async def drive(self, work: W) -> Sequence[float]:
        """Left: one round; the answer is the seconds of everything that is timed."""
        raise NotImplementedError

    async def serve(self, work: W) -> None:
        """Right: do what :meth:`drive` needs of the other side."""

    async def digest(self, work: W) -> str:
        """Digest what a round has moved: both sides have the same."""
        return digest(self.memory)

    async def verify(self, work: W) -> None:
        """Left: raise if what the last round has moved is not what it should be."""

    async def cpu(self) -> float:
        """Return CPU seconds of this process, the kernel's on its behalf included."""
        return time.process_time()

    async def close(self) -> None:
        """End what was begun."""
        await self.opened.aclose()


CALLS: Final = frozenset(n for n in vars(BenchSide) if n[0] != "_") - {
    "check",
    "close",
    "work_type",
}


async def each_timed(
    count: int, once: Callable[[int], Awaitable[object]]
) -> list[float]:
    """Do something so many times, one after the other; seconds of each."""
    clock, seconds = time.perf_counter, []
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
    """Make connections; seconds of each, of its first transfer and of its second."""
    clock, seconds = time.perf_counter, []
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
    """Return what two sides compare instead of the bytes."""
    return hashlib.blake2b(
        np.frombuffer(data, np.uint8).data, digest_size=_DIGEST_BYTES
    ).hexdigest()


async def fill(memory: bytearray | memoryview | Bytes) -> None:
    """Fill memory with random bytes.

    In a thread: a loop that stands still for long is a dead peer to others.
    """
    words = np.frombuffer(memory, np.uint8)

    def write() -> None:
        words[:] = np.random.default_rng().integers(0, 256, words.size, np.uint8)

    await asyncio.to_thread(write)


class BytesDiffer(Exception):
    """Reports that what has arrived is not what was sent."""


def require_same(left: object, right: object) -> None:
    """Compare what has arrived with what was sent."""
    if left != right:
        raise BytesDiffer(f"what arrived ({left}) is not what was sent ({right})")


# --- the process ----------------------------------------------------------------------


def make(role: str, options: Mapping[str, str]) -> BenchSide[Any]:
    """Make the side that a role names."""
    module, _, name = role.partition(":")
    found = getattr(import_module(module), name)(options)
    assert isinstance(found, BenchSide)
    return found


def asked(name: str, arguments: Mapping[str, Any]) -> bytes:
    """Write a call, which :func:`answer` reads; a work is one of its arguments."""
    return msgspec.json.encode({"call": name, "arguments": arguments})


async def answer(
    side: BenchSide[Any], line: bytes, calls: frozenset[str] = CALLS
) -> bytes:
    """Do what one line says; an exception becomes an answer too."""
    name = ""
    try:
        call = msgspec.json.decode(line)
        name, arguments = call["call"], call["arguments"]
        if name not in calls:
            raise ValueError(f"there is no call {name!r}")
        if "work" in arguments:
            work = msgspec.convert(arguments["work"], side.work_type)
            side.check(work)
            arguments["work"] = work
        found = {"answer": await getattr(side, name)(**arguments)}
    except Exception as exc:  # noqa: BLE001 - it is reported by the other process
        found = {"error": f"{name}: {type(exc).__name__}: {exc}"}
    return json.dumps(found).encode() + b"\n"


async def obey(side: BenchSide[Any]) -> None:
    """Answer line after line until there are no more."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        while line := await reader.readline():
            said = await answer(side, line)
            # Without a buffer: whoever was interrupted does not read it any more.
            with contextlib.suppress(BrokenPipeError):
                os.write(sys.stdout.fileno(), said)
    finally:
        await side.close()


def main(arguments: Sequence[str]) -> None:
    """Be a side until the input ends: ``ROLE [KEY=VALUE ...]``."""
    # Ctrl-C reaches every process of a terminal; this one ends with its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    role, *pairs = arguments
    options = dict(pair.split("=", 1) for pair in pairs)
    run(obey(make(role, options)), options.get("loop", "asyncio"))


def run(main: Coroutine[Any, Any, None], loop: str) -> None:
    """Run a coroutine on a loop of asyncio or uvloop."""
    if loop == "uvloop":
        import uvloop  # noqa: PLC0415 - not on every platform

        uvloop.run(main)
    else:
        asyncio.run(main)
