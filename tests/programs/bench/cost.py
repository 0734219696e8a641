"""Memory of connections and transfers, stalls of the loop, CPU.

What a transport takes from the process that uses it, at each side. Nobody stands
beside it: what counts are the bounds.
"""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

import kvwire
from kvwire.cli.bench import sides
from kvwire.cli.bench.command import work_of
from kvwire.cli.bench.line import HOST, Line, turns
from kvwire.cli.bench.pair import BenchError, Contender
from kvwire.cli.bench.report import head, new_table
from kvwire.cli.bench.work import LEFT, PULL, RIGHT, BenchMemory, Work
from kvwire.limits import GIB, KIB
from tests.programs.bench.targets import verdict

IDLE: Final = "idle"
OPEN: Final = "open"
PEAK: Final = "peak"
CPU: Final = "cpu"
STALLS: Final = "stalls"
# In the order in which they are done, with how many of each.
MEASURES: Final = {IDLE: 128, OPEN: 256, PEAK: 1, CPU: 8, STALLS: 8}
LAYER_BYTES: Final = 4 * KIB
# One idle connection, and one callback while bytes move.
IDLE_TARGET_BYTES: Final = 64 * KIB
STALL_S: Final = 10e-3
_GO: Final = 1
# Made before any is counted: imports, caches and pools of the allocator.
_WARM_UP: Final = 16
# Each row: its measure, its figure, the scale and unit, and what is aimed at.
_ROWS: Final = (
    ("idle connection", IDLE, "bytes", KIB, "KiB", IDLE_TARGET_BYTES),
    ("open transfer", OPEN, "bytes", KIB, "KiB", None),
    ("peak of a transfer", PEAK, "bytes", KIB, "KiB", None),
    ("CPU for a GiB", CPU, "s_per_gib", 1.0, "s", None),
    ("callback, CPU, p99.9", STALLS, "cpu_p999_s", 1e-3, "ms", STALL_S),
    ("callback, CPU, longest", STALLS, "cpu_max_s", 1e-3, "ms", None),
    ("callback, wall, p99.9", STALLS, "wall_p999_s", 1e-3, "ms", STALL_S),
)


@dataclass(slots=True)
class Cost:
    """What one transport costs; the answers are of the left and the right side."""

    name: str
    answers: dict[str, list[list[dict[str, Any]]]] = field(
        default_factory=lambda: {measure: [] for measure in MEASURES}
    )
    # Why there is no more of it.
    failure: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def median(self, measure: str, key: str) -> list[float]:
        sides = zip(*self.answers[measure], strict=True)
        return [median(one[key] for one in side) for side in sides]


def steps(transports: Sequence[str], rounds: int) -> int:
    """How often :func:`cost` reports progress, unless somebody fails."""
    return len(transports) * rounds * len(MEASURES)


def cost(
    transports: Sequence[str],
    round_bytes: int,
    rounds: int,
    progress: Callable[[str], None],
) -> list[Cost]:
    work = work_of(PULL, LAYER_BYTES, cross_layer=False, round_bytes=round_bytes)
    found = [Cost(f"kvwire {name}") for name in transports]
    for _ in range(rounds):
        for transport, result in zip(transports, found, strict=True):
            options = {"transport": transport}
            one = Contender(result.name, left, right, options=options)
            try:
                with one.start() as pair:
                    result.facts = pair.facts
                    for measure, count in MEASURES.items():
                        progress(f"{result.name}: {measure}")
                        sample = pair.turn(replace(work, verb=measure, count=count))
                        answers = [answer["found"] for answer in sample.answers]
                        result.answers[measure].append(answers)
            except BenchError as exc:
                result.failure = str(exc)
    return found


def render(found: Sequence[Cost], size: str) -> RenderableType:
    """A row for each transport and measure; both sides, and what is aimed at."""
    table = new_table("cost: medians", "measure", "left", "right")
    table.add_column("target", no_wrap=True)
    for result in found:
        for name, measure, key, scale, unit, bound in _ROWS:
            values = result.median(measure, key)
            target = Text()
            if bound is not None and values:
                target = Text(f"<= {bound / scale:g} ")
                target += verdict(max(values) <= bound)
            shown = [f"{value / scale:.2f} {unit}" for value in values]
            if values:
                table.add_row(result.name, name, *shown, target)
    lines = [
        f"Left pulls, right publishes: {size} in fragments of 4 KiB.",
        "Callbacks are those of asyncio; wall time has others' work in it.",
    ]
    lines += [f"{r.name} failed: {r.failure}" for r in found if r.failure]
    return Group(table, Text(), *map(Text, lines))


def document(found: Sequence[Cost], settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON document: bytes and seconds, left and right, by round."""
    costs = {result.name: asdict(result) for result in found}
    return {**head("cost", settings), "transports": costs}


# --- a side ---------------------------------------------------------------------------


async def left(line: Line, options: dict[str, Any]) -> None:
    async with sides.opened("left") as communicator:
        where, transport = options["address"], options["transport"]

        async def connect() -> kvwire.Connection:
            return await communicator.connect(where, transport=transport)

        connection = await connect()
        await line.send({"facts": sides.facts(connection)})
        await Measures(communicator, connection, connect, LEFT).take_all(line)


async def right(line: Line, _: dict[str, Any]) -> None:
    async with sides.opened("right") as communicator:
        where = await communicator.listen(f"tcp://{HOST}:0")
        await line.send({"address": str(where), "facts": {}})
        connection = await communicator.accept()
        measures = Measures(communicator, connection, communicator.accept, RIGHT)
        await measures.take_all(line)


class Measures:
    """What one side does for each measure, both sides at the same time.

    * ``idle``: ``count`` more connections, and what memory each of them takes;
    * ``open``: ``count`` transfers of one block, of which nothing is ready;
    * ``peak``: the most memory that a transfer takes besides its payload;
    * ``cpu``: CPU seconds of ``count`` transfers one after the other;
    * ``stalls``: likewise, and how long every callback took.
    """

    def __init__(
        self,
        communicator: kvwire.Communicator,
        connection: kvwire.Connection,
        one_more: Callable[[], Any],
        side: int,
    ) -> None:
        self._communicator = communicator
        self._connection = connection
        self._one_more = one_more
        self._side = side
        self._memory = BenchMemory(side, {})
        self._number = 0

    async def take_all(self, line: Line) -> None:
        async for turn in turns(line):
            work = turn.work
            self._memory.have(replace(work, verb=PULL, count=1), checks=False)
            if self._side == RIGHT:
                await line.send({"offer": ""})
            found = await self._take(work)
            if self._side == RIGHT:
                await line.receive()
            answer = {"seconds": (), "cpu_s": 0, "digest": "", "found": found}
            await line.send(answer)
        self._memory.close()

    async def _take(self, work: Work) -> dict[str, Any]:
        measure, count = work.verb, work.count
        if measure == IDLE:
            return await self._idle(count)
        if measure == OPEN:
            return await self._open_transfers(count)
        await self._move()  # a warm-up
        if measure == PEAK:
            gc.collect()
            with _traced() as taken:
                await self._move()
                return {"bytes": taken()[1]}
        before_s = time.process_time()
        with watched(on=measure == STALLS) as found:
            for _ in range(count):
                await self._move()
        if measure == STALLS:
            return found()
        cpu_s = time.process_time() - before_s
        return {"s_per_gib": cpu_s * GIB / work.moved_bytes}

    async def _idle(self, count: int) -> dict[str, Any]:
        kept = [await self._one_more() for _ in range(_WARM_UP)]
        before = resident_bytes()
        kept += [await self._one_more() for _ in range(count)]
        after = resident_bytes()
        await self._meet()
        for connection in kept:
            connection.abort()
        return {"bytes": (after - before) / count}

    async def _open_transfers(self, count: int) -> dict[str, Any]:
        """Each side begins its ends; they are matched, and nothing is ever ready."""
        cache, blocks = self._memory.chosen
        ends = [self._start(cache, blocks[:1]) for _ in range(_WARM_UP)]
        await self._meet()
        gc.collect()
        with _traced() as taken:
            ends += [self._start(cache, blocks[:1]) for _ in range(count)]
            await self._meet()
            gc.collect()
            open_bytes = taken()[0]
        await self._meet()
        for end in ends:
            end.abort("the benchmark is done")
            await end.drained()
        return {"bytes": open_bytes / count}

    def _start(self, *chosen: Any) -> kvwire.Incoming | kvwire.Outgoing:
        self._number += 1
        if self._side == LEFT:
            return self._connection.pull(self._number, *chosen)
        return self._communicator.publish(self._number, *chosen)

    async def _move(self) -> None:
        end = self._start(*self._memory.chosen)
        if isinstance(end, kvwire.Outgoing):
            end.ready()
            end.finish()
        assert (await end).complete
        await end.drained()

    async def _meet(self) -> None:
        """Wait until both sides are here, over the connection that is measured."""
        sent = self._connection.send(_GO, b"")
        await self._connection.recv(_GO)
        await sent


@contextmanager
def _traced() -> Iterator[Callable[[], tuple[int, int]]]:
    """What Python and NumPy have allocated since, now and at most."""
    tracemalloc.start()
    try:
        yield tracemalloc.get_traced_memory
    finally:
        tracemalloc.stop()


def resident_bytes() -> int:
    """Memory of this process that lies in RAM, after the garbage has been collected."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * KIB


@contextmanager
def watched(*, on: bool = True) -> Iterator[Callable[[], dict[str, Any]]]:
    """Time every callback of this process's asyncio loops until the end.

    The wall time includes what other processes take of the CPU, the CPU time does not.
    A loop of uvloop runs its handles in C; what they call is the same code.
    """
    walls, cpus = [0.0], [0.0]
    handle: Any = asyncio.Handle
    run = handle._run

    def timed(self: asyncio.Handle) -> None:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        run(self)
        cpus.append(time.thread_time() - cpu_s)
        walls.append(time.perf_counter() - wall_s)

    handle._run = timed if on else run
    try:
        yield lambda: {
            "callbacks": len(walls) - 1,
            "wall_p999_s": _p999(walls),
            "wall_max_s": max(walls),
            "cpu_p999_s": _p999(cpus),
            "cpu_max_s": max(cpus),
        }
    finally:
        handle._run = run


def _p999(values: list[float]) -> float:
    return sorted(values)[-(-999 * len(values) // 1000) - 1]
