"""Counts what a piece of code consists of: calls of Python, frames and system calls.

They are counted with both sides on one loop of this process, so nothing depends on
whose turn it is on a CPU, and the counts of two runs are the same but for a wake-up
more or less. What the loop itself does is not counted: it is another one in each
engine.
"""

from __future__ import annotations

import asyncio
import cProfile
import selectors
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import kvwire_certify.bench
from kvwire.proto.framing import Framing
from kvwire.wire.header import FrameType
from kvwire_certify.bench.line import Seconds, Turn
from kvwire_certify.bench.sides import Left, Right, opened
from kvwire_certify.bench.work import Work

_SOCKET: Final = "of '_socket.socket' objects>"
# Functions of ours that are one system call, by file and name.
_CALLS: Final = {("iovec.py", "readv"), ("iovec.py", "writev"), ("cma.py", "read")}
# Whose calls are not counted: the benchmarks' own, and those of a loop in Python.
_OUTSIDE: Final = (
    str(Path(kvwire_certify.bench.__file__).parent),
    str(Path(__file__).parent),
    str(Path(asyncio.__file__).parent),
    str(Path(selectors.__file__)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of one operation, both sides together."""

    # Of Python functions; a generator that goes on is one more.
    calls: float
    # Of sockets and of vectored reads and writes; not the loop's own.
    system_calls: float
    # By name, on the wire.
    frames: dict[str, float]
    # Each with its own microseconds under the profiler, and its calls; dearest first.
    functions: list[str] = field(repr=False)

    def __str__(self) -> str:
        """Name frames without those that come less than once in two."""
        frames = {name: round(number) for name, number in self.frames.items()}
        said = ", ".join(f"{n} {name}" for name, n in frames.items() if n)
        return (
            f"{self.calls:.0f} calls, {self.system_calls:.0f} of the system\n  {said}"
        )


class Tally:
    """What was counted within :func:`counting`."""

    def __init__(self) -> None:
        self.profile = cProfile.Profile()
        self.frames: Counter[int] = Counter()

    def of_each(self, times: int) -> Counts:
        """Divide by the number of operations."""
        return _counts(self.profile, self.frames, times)


@contextmanager
def counting() -> Iterator[Tally]:
    """Count until the end of the block."""
    tally = Tally()
    with _counted_frames(tally.frames), tally.profile:
        yield tally


def _counts(profile: cProfile.Profile, frames: Counter[int], times: int) -> Counts:
    calls = system_calls = 0
    entries = sorted(profile.getstats(), key=lambda one: -one.inlinetime)
    for entry in entries:
        code: Any = entry.code
        if isinstance(code, str):
            system_calls += entry.callcount * code.endswith(_SOCKET)
        elif not code.co_filename.startswith(_OUTSIDE):
            calls += entry.callcount
            key = Path(code.co_filename).name, code.co_name
            system_calls += entry.callcount * (key in _CALLS)
    return Counts(
        calls=calls / times,
        system_calls=system_calls / times,
        frames={FrameType(n).name: frames[n] / times for n in sorted(frames)},
        functions=[
            f"{1e6 * one.inlinetime / times:8.2f} us {one.callcount / times:7.2f} x  "
            f"{_named(one.code)}"
            for one in entries
        ],
    )


def _named(code: Any) -> str:
    """What was called: of Python its file as well, of C only how it shows itself."""
    if isinstance(code, str):
        return code
    return f"{'/'.join(Path(code.co_filename).parts[-2:])} {code.co_qualname}"


@contextmanager
def _counted_frames(found: Counter[int]) -> Iterator[None]:
    """Count each frame of any connection of this process by its type."""
    control, payload = Framing.control, Framing.payload

    def counting(send: Callable[..., Any]) -> Any:
        def counted(self: Framing, frame_type: int, *rest: Any, **named: Any) -> Any:
            found[frame_type] += 1
            return send(self, frame_type, *rest, **named)

        return counted

    Framing.control, Framing.payload = counting(control), counting(payload)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Framing.control, Framing.payload = control, payload  # type: ignore[method-assign]


# --- operations of ``kvwire bench ops`` -----------------------------------------------


async def count(work: Work, transport: str, memory: str = "") -> Counts:
    """Count what one operation consists of, with caches in this kind of memory."""
    async with opened("left") as here, opened("right") as there:
        where = await there.listen("tcp://127.0.0.1:0")
        options = {"transport": transport, "memory": memory, "address": str(where)}
        connection = await here.connect(where, transport=transport)
        left = Counted(here, connection, options)
        right = Right(there, await there.accept(), options)
        for _ in range(2):  # the first one warms up
            seconds = await _round(left, right, work)
        left.memory.close()
        right.memory.close()
    return left.tally.of_each(len(seconds))


async def _round(left: Left, right: Right, work: Work) -> Seconds:
    asked, answers = asyncio.Queue[Any](), asyncio.Queue[Any]()

    class Here:
        send, receive = staticmethod(answers.put), staticmethod(asked.get)

    answering = asyncio.ensure_future(right.round(Turn(work), Here()))
    offered = await answers.get()
    found = await left.round(Turn(work, offer=offered["offer"]))
    asked.put_nowait("over")
    await answering
    seconds: Seconds = found["seconds"]
    return seconds


class Counted(Left):
    """A left side whose last round is counted, with what the right one does in it."""

    tally: Tally

    async def move(self, work: Work, reach: Any) -> Seconds:
        with counting() as self.tally:
            return await super().move(work, reach)
