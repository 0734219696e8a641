"""What an operation consists of, counted: calls of Python, frames, system calls.

Both sides are on one loop of this process, so nothing depends on whose turn it is on a
CPU, and the counts of two runs are the same but for a wake-up more or less. What the
loop itself does is not counted: it is another one in each engine.
"""

from __future__ import annotations

import asyncio
import cProfile
import selectors
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvwire.cli.bench.ops import Meter, OpsSide, OpsWork
from kvwire.cli.bench.side import JoinedSide
from kvwire.proto.framing import Framing
from kvwire.wire.header import FrameType

_SOCKET: Final = "of '_socket.socket' objects>"
# Functions of ours that are one system call, by file and name.
_CALLS: Final = {
    *(("iovec.py", "readv"), ("iovec.py", "writev"), ("cma.py", "read")),
}
# Whose calls are not counted: the benchmark's own, and those of a loop in Python.
_OUTSIDE: Final = (
    str(Path(__file__).parent),
    str(Path(asyncio.__file__).parent),
    str(Path(selectors.__file__)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of one operation, both sides together.

    Attributes:
        calls: Of Python functions; a generator that goes on is one more.
        system_calls: Of sockets and of vectored reads and writes; not the loop's own.
        frames: By name, on the wire.
    """

    calls: float
    system_calls: float
    frames: dict[str, float]


class CountMeter(Meter):
    """Counts in place of CPU seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._profile = cProfile.Profile()
        self._frames: Counter[int] = Counter()
        self._counting = _count_frames(self._frames)

    def start(self) -> None:
        """See Meter."""
        self._counting = _count_frames(self._frames)
        self._counting.__enter__()
        self._profile.enable()

    def stop(self) -> None:
        """See Meter."""
        self._profile.disable()
        self._counting.__exit__(None, None, None)

    def counts(self, operations: int) -> Counts:
        """Return what was counted, by operation."""
        calls = system_calls = 0
        for entry in self._profile.getstats():
            code: Any = entry.code
            if isinstance(code, str):
                system_calls += entry.callcount * code.endswith(_SOCKET)
            elif not code.co_filename.startswith(_OUTSIDE):
                calls += entry.callcount
                key = Path(code.co_filename).name, code.co_name
                system_calls += entry.callcount * (key in _CALLS)
        return Counts(
            calls=calls / operations,
            system_calls=system_calls / operations,
            frames={
                name: count / operations
                for name, count in sorted(
                    (FrameType(number).name, count)
                    for number, count in self._frames.items()
                )
            },
        )


def count(works: Sequence[OpsWork], transport: str) -> list[Counts]:
    """Count each operation."""
    return asyncio.run(_count(works, transport))


async def _count(works: Sequence[OpsWork], transport: str) -> list[Counts]:
    options = {"transport": transport}
    left = OpsSide(options, CountMeter)
    both = JoinedSide(left, OpsSide(options))
    found = []
    try:
        await both.connect(None)
        for work in works:
            await both.use(work, None)
            await both.drive(work)  # warms up
            values = (await both.drive(work))["values"]
            assert isinstance(left.meter, CountMeter)
            found.append(left.meter.counts(len(values)))
    finally:
        await both.close()
    return found


@contextmanager
def _count_frames(into: Counter[int]) -> Iterator[None]:
    """Count each frame of any connection of this process by its type."""
    control, payload = Framing.control, Framing.payload

    def count_control(self: Framing, frame_type: int, *rest: Any, **named: Any) -> Any:
        into[frame_type] += 1
        return control(self, frame_type, *rest, **named)

    def count_payload(self: Framing, frame_type: int, *rest: Any, **named: Any) -> Any:
        into[frame_type] += 1
        return payload(self, frame_type, *rest, **named)

    Framing.control, Framing.payload = count_control, count_payload  # type: ignore[method-assign]
    try:
        yield
    finally:
        Framing.control, Framing.payload = control, payload  # type: ignore[method-assign]
