"""``kvwire bench ops``: what one operation costs, and what it consists of.

Calls of Python, frames and system calls are counted with both sides on one loop of this
process, so nothing depends on whose turn it is on a CPU, and the counts of two runs are
the same but for a wake-up more or less. What the loop itself does is not counted: it is
another one in each engine.
"""

from __future__ import annotations

import asyncio
import cProfile
import selectors
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import RenderableType
from rich.text import Text

from kvwire.cli.bench import report
from kvwire.cli.bench.bare import StreamsSide
from kvwire.cli.bench.operations import (
    GET,
    PULL,
    PUSH,
    PUT,
    READY,
    ROUND_TRIP,
    SEND,
    STORES,
    Meter,
    OpsSide,
    OpsWork,
)
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.report import COMMON, Common, Rounds
from kvwire.cli.bench.side import JoinedSide
from kvwire.cli.bench.turns import (
    MICROSECONDS,
    Benchmark,
    Case,
    CaseResult,
    Findings,
)
from kvwire.limits import KIB, MIB
from kvwire.proto.framing import Framing
from kvwire.wire.header import FrameType

# Operations of a round, and those that are counted: enough that what comes seldom,
# such as CREDIT, has its share.
COUNT: Final = 40
# Connections are dearer than what is done on them.
FRESH_COUNT: Final = 10

_SOCKET: Final = "of '_socket.socket' objects>"
# Functions of ours that are one system call, by file and name.
_CALLS: Final = {("iovec.py", "readv"), ("iovec.py", "writev"), ("cma.py", "read")}
# Whose calls are not counted: the benchmark's own, and those of a loop in Python.
_OUTSIDE: Final = (
    str(Path(__file__).parent),
    str(Path(asyncio.__file__).parent),
    str(Path(selectors.__file__)),
)


def operations() -> Sequence[OpsWork]:
    """Return all of them."""
    kib64 = 64 * KIB
    alike = [
        OpsWork(verb=verb, nbytes=nbytes, count=COUNT, layers=layers, blocks=blocks)
        for verb, nbytes, blocks, layers in (
            (PULL, kib64, 1, 16),
            (PULL, 256 * KIB, 2, 16),
            (PUSH, 256 * KIB, 2, 16),
            (PUSH, 4 * MIB, 2, 32),
        )
    ]
    first = OpsWork(verb=PULL, nbytes=kib64, count=FRESH_COUNT, layers=16, fresh=1)
    return [
        first,
        *alike,
        OpsWork(verb=READY, nbytes=80 * kib64, count=79, layers=80),
        OpsWork(verb=ROUND_TRIP, nbytes=64, count=10 * COUNT),
        OpsWork(verb=SEND, nbytes=kib64, count=COUNT),
        OpsWork(verb=SEND, nbytes=MIB, count=COUNT),
        OpsWork(verb=PUT, nbytes=kib64, count=COUNT),
        OpsWork(verb=GET, nbytes=kib64, count=COUNT),
        *(
            OpsWork(verb=verb, nbytes=nbytes, count=COUNT, layers=16)
            for nbytes in (kib64, MIB)
            for verb in STORES
        ),
    ]


# --- what is counted ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of one operation, both sides together."""

    # Of Python functions; a generator that goes on is one more.
    calls: float
    # Of sockets and of vectored reads and writes; not the loop's own.
    system_calls: float
    # By name, on the wire.
    frames: dict[str, float]


class CountMeter(Meter):
    """Counts in place of CPU seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._profile = cProfile.Profile()
        self._frames: Counter[int] = Counter()
        self._counting = _count_frames(self._frames)

    def start(self) -> None:
        self._counting = _count_frames(self._frames)
        self._counting.__enter__()
        self._profile.enable()

    def stop(self) -> None:
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
        frames = sorted((FrameType(n).name, count) for n, count in self._frames.items())
        return Counts(
            calls=calls / operations,
            system_calls=system_calls / operations,
            frames={name: count / operations for name, count in frames},
        )


async def count(works: Sequence[OpsWork], transport: str) -> list[Counts]:
    """Count each operation."""
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

    def counting(send: Callable[..., Any]) -> Any:
        def counted(self: Framing, frame_type: int, *rest: Any, **named: Any) -> Any:
            into[frame_type] += 1
            return send(self, frame_type, *rest, **named)

        return counted

    Framing.control, Framing.payload = counting(control), counting(payload)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Framing.control, Framing.payload = control, payload  # type: ignore[method-assign]


# --- the command ----------------------------------------------------------------------


def sides_cpu_s(row: CaseResult) -> list[float] | None:
    """CPU seconds of an operation, left and right.

    With a connection for each, the other side's share of that is not known.
    """
    samples = row.samples.get(row.case.contenders[0].name)
    if row.case.work.fresh or samples is None:
        return None
    each = zip(*(sample.cpu_s for sample in samples.rounds), strict=True)
    return [median(side) / len(samples.rounds[0].values) for side in each]


def table_of(findings: Findings, counted: Sequence[Counts]) -> list[RenderableType]:
    """Make a row of what each operation costs, and the names of its frames below."""
    columns = ("CPU us", "CPU us", "calls", "system", "frames")
    table = report.new_table("of one operation", *columns)
    alike: dict[str, list[str]] = {}
    for row, counts in zip(findings, counted, strict=True):
        sides = sides_cpu_s(row)
        figures = (counts.calls, counts.system_calls, sum(counts.frames.values()))
        table.add_row(
            row.case.name,
            *(["-", "-"] if sides is None else [f"{1e6 * s:.0f}" for s in sides]),
            *(f"{figure:.0f}" for figure in figures),
        )
        alike.setdefault(_frames(counts.frames), []).append(row.case.name)
    lines = [Text(f"{', '.join(names)}: {said}") for said, names in alike.items()]
    return [Text(), table, Text(), *lines]


def _frames(frames: Mapping[str, float]) -> str:
    """Such as ``2 MESSAGE, 1 PUT``; what comes less than once in two is left out."""
    whole = {name: round(number) for name, number in frames.items()}
    return ", ".join(f"{number} {name}" for name, number in whole.items() if number)


def command(
    *,
    transport: str = "tcp",
    rounds: Rounds = 5,
    common: Common = COMMON,
) -> int:
    """One operation: its time, the CPU of each side, its calls and its frames.

    Transfers, the first on a connection and the next; one layer of many; messages, put
    and get; a block into a store server and out of it.

    Args:
        transport: The transport of kvwire; of a store, what its server offers.
        rounds: How often everything is measured.
        common: Options of every benchmark.
    """
    report.require_known([transport])
    options = {"transport": transport, "loop": common.loop}
    ours = Contender(f"kvwire {transport}", OpsSide, options=options)
    streams = Contender(f"{common.loop} streams", StreamsSide, options=options)
    counted = cache(lambda: asyncio.run(count(operations(), transport)))

    def row(finding: CaseResult, counts: Counts) -> dict[str, Any]:
        cpu_s = {ours.name: sides_cpu_s(finding)}
        return {**report.row_of(finding), "cpu_s": cpu_s, "counts": asdict(counts)}

    benchmark = Benchmark(
        name="ops",
        cases=[
            Case(
                name=work.name,
                work=work,
                unit=MICROSECONDS,
                contenders=[ours, *[streams] * (work.verb == ROUND_TRIP)],
            )
            for work in operations()
        ],
        notes=[
            "CPU: of the side that asks, and of the other. Calls: of Python.",
            "System: calls of sockets, readv and writev, without the loop's own.",
        ],
        below=lambda found: table_of(found, counted()),
        more=lambda found: {"cases": list(map(row, found, counted()))},
    )
    return common.run(benchmark, transport=transport, rounds=rounds)
