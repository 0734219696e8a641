"""What operations consist of: calls of Python, frames and system calls.

They are counted with both sides on one loop of this process, so nothing depends on
whose turn it is on a CPU, and the counts of two runs are the same but for a wake-up
more or less. What the loop itself does is not counted: it is another one in each
engine.
"""

from __future__ import annotations

import asyncio
import cProfile
import selectors
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import kvwire.cli.bench
from kvwire.cli.bench import ops
from kvwire.cli.bench.operations import operations
from kvwire.cli.bench.ops import store_operations
from kvwire.cli.bench.side import Bench, Channel, Work, driven
from kvwire.cli.bench.store import SERVER, store
from kvwire.proto.framing import Framing
from kvwire.wire.header import FrameType

_SOCKET: Final = "of '_socket.socket' objects>"
# Functions of ours that are one system call, by file and name.
_CALLS: Final = {("iovec.py", "readv"), ("iovec.py", "writev"), ("cma.py", "read")}
# Whose calls are not counted: the benchmark's own, and those of a loop in Python.
_OUTSIDE: Final = (
    str(Path(kvwire.cli.bench.__file__).parent),
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


def works() -> Mapping[str, Work]:
    """Return all operations of ``kvwire bench ops``, by the name of their row."""
    return {**ops.operations(), **store_operations()}


async def count(work: Work, transport: str, memory: str = "") -> Counts:
    """Count what one operation consists of, with caches in this kind of memory."""
    served = work in store_operations().values()
    options = {"transport": transport, "memory": memory}
    if served:
        options = {"tier": SERVER}
    program = store if served else operations
    here, there = await asyncio.gather(*map(Channel.over, socket.socketpair()))
    left, right = Counted(options), Bench(options, left=False)
    left.meet(here)
    right.meet(there)
    other = asyncio.ensure_future(right.play(program))
    async with driven(left, program) as (_, ask):
        await ask(work)  # warms up
        seconds = (await ask(work)).seconds
    await other
    return _counts(left.profile, left.frames, len(seconds))


class Counted(Bench):
    """A left side whose last round is counted, with what the right one does in it."""

    profile: cProfile.Profile
    frames: Counter[int]

    @asynccontextmanager
    async def clock(self) -> AsyncIterator[None]:
        self.profile = cProfile.Profile()
        async with super().clock():
            with _counted_frames() as self.frames, self.profile:
                yield


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
def _counted_frames() -> Iterator[Counter[int]]:
    """Count each frame of any connection of this process by its type."""
    control, payload = Framing.control, Framing.payload
    found: Counter[int] = Counter()

    def counting(send: Callable[..., Any]) -> Any:
        def counted(self: Framing, frame_type: int, *rest: Any, **named: Any) -> Any:
            found[frame_type] += 1
            return send(self, frame_type, *rest, **named)

        return counted

    Framing.control, Framing.payload = counting(control), counting(payload)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Framing.control, Framing.payload = control, payload  # type: ignore[method-assign]
