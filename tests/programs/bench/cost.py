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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

import kvwire
from kvwire.cli.bench.fragments import work_of
from kvwire.cli.bench.operations import (
    BenchMemory,
    End,
    Ends,
    OpsRound,
    OpsWork,
    joined,
)
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.report import head, new_table
from kvwire.cli.bench.side import Bench, BenchError
from kvwire.limits import GIB, KIB
from kvwire.types import in_bytes
from tests.programs.bench.fragments import verdict

IDLE: Final = "idle"
OPEN: Final = "open"
PEAK: Final = "peak"
STALLS: Final = "stalls"
CPU: Final = "cpu"
# In the order in which they are done, with how many of each.
MEASURES: Final = {IDLE: 128, OPEN: 256, PEAK: 1, CPU: 8, STALLS: 8}
LAYER_BYTES: Final = 4 * KIB
# One idle connection, and one callback while bytes move.
IDLE_TARGET_BYTES: Final = 64 * KIB
STALL_S: Final = 10e-3
_GO: Final = 1
# Made before any is counted: imports, caches and pools of the allocator.
_WARM_UP: Final = 16


@dataclass(slots=True)
class Cost:
    """What one transport costs; the answers are of the left and the right side."""

    name: str
    work: OpsWork
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
    work = work_of("pull", LAYER_BYTES, cross_layer=False, round_bytes=round_bytes)
    found = [Cost(f"kvwire {name}", work) for name in transports]
    for _ in range(rounds):
        for transport, result in zip(transports, found, strict=True):
            if not result.failure:
                _round(transport, result, progress)
    return found


def _round(transport: str, result: Cost, progress: Callable[[str], None]) -> None:
    options = {"transport": transport}
    try:
        with Contender(result.name, costs, options=options).start() as pair:
            result.facts = pair.facts
            for measure, count in MEASURES.items():
                progress(f"{result.name}: {measure}")
                asked = {**asdict(result.work), "measure": measure, "repeat": count}
                found = pair.round(CostWork(**asked))
                result.answers[measure].append([*found.more])
    except BenchError as exc:
        result.failure = str(exc)


def render(found: Sequence[Cost]) -> RenderableType:
    """A row for each transport and measure; both sides, and what is aimed at."""
    table = new_table("cost: medians", "measure", "left", "right")
    table.add_column("target", no_wrap=True)
    work = found[0].work
    moved_gib = work.moved_bytes * MEASURES[CPU] / GIB
    for result in found:
        for name, measure, key, scale, unit, bound in (
            ("idle connection", IDLE, "bytes", KIB, "KiB", IDLE_TARGET_BYTES),
            ("open transfer", OPEN, "bytes", KIB, "KiB", None),
            ("peak of a transfer", PEAK, "bytes", KIB, "KiB", None),
            ("CPU for a GiB", CPU, "cpu_s", moved_gib, "s", None),
            ("callback, CPU, p99.9", STALLS, "cpu_p999_s", 1e-3, "ms", STALL_S),
            ("callback, CPU, longest", STALLS, "cpu_max_s", 1e-3, "ms", None),
            (
                "callback, wall, p99.9",
                STALLS,
                "wall_p999_s",
                1e-3,
                "ms",
                STALL_S,
            ),
        ):
            values = result.median(measure, key)
            target = Text()
            if bound is not None and values:
                target = Text(f"<= {bound / scale:g} ")
                target += verdict(max(values) <= bound)
            shown = [f"{value / scale:.2f} {unit}" for value in values]
            if values:
                table.add_row(result.name, name, *shown, target)
    size, fragment = in_bytes(work.moved_bytes), in_bytes(work.layer_bytes)
    lines = [
        f"Left pulls, right publishes: {size} in fragments of {fragment}.",
        "Callbacks are those of asyncio; wall time has others' work in it.",
    ]
    lines += [f"{r.name} failed: {r.failure}" for r in found if r.failure]
    return Group(table, Text(), *map(Text, lines))


def document(found: Sequence[Cost], settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON document: bytes and seconds, left and right, by round."""
    return {
        **head("cost", settings),
        "transports": {
            result.name: {
                "work": asdict(result.work),
                "measures": result.answers,
                "failure": result.failure,
                "facts": result.facts,
            }
            for result in found
        },
    }


# --- a side ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWork(OpsWork):
    """A transfer, and what of it is measured; see :class:`Measures`."""

    measure: str
    repeat: int


async def costs(b: Bench) -> None:
    """Take one measure at a time, at both sides together."""
    memory = BenchMemory(b)
    async with joined(b) as ends:
        async for work in b.works(CostWork):
            memory.have(work)
            found = await Measures(b, ends, memory, work).take()
            await b.report(more=found)
    memory.close()


@dataclass(frozen=True, slots=True)
class Measures:
    """What one side does for each measure.

    * ``idle``: ``repeat`` more connections, and what memory each of them takes;
    * ``open``: ``repeat`` transfers of one block, of which nothing is ready;
    * ``peak``: the most memory that a transfer takes besides its payload;
    * ``cpu``: CPU seconds of ``repeat`` transfers one after the other;
    * ``stalls``: likewise, and how long every callback took.
    """

    b: Bench
    ends: Ends
    memory: BenchMemory
    work: CostWork

    async def take(self) -> dict[str, Any]:
        measure, count = self.work.measure, self.work.repeat
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
        return {"cpu_s": time.process_time() - before_s} if measure == CPU else found()

    async def _idle(self, count: int) -> dict[str, Any]:
        kept = [await self._one_more() for _ in range(_WARM_UP)]
        before = resident_bytes()
        kept += [await self._one_more() for _ in range(count)]
        after = resident_bytes()
        await self._meet()
        for connection in kept:
            connection.abort()
        return {"bytes": (after - before) / count}

    async def _one_more(self) -> kvwire.Connection:
        communicator = self.ends.communicator
        if not self.b.left:
            return await communicator.accept()
        where, transport = self.ends.addresses[0], self.b.options["transport"]
        return await communicator.connect(where, transport=transport)

    async def _open_transfers(self, count: int) -> dict[str, Any]:
        """Each side begins its ends; they are matched, and nothing is ever ready."""
        ends = [self._start() for _ in range(_WARM_UP)]
        await self._meet()
        gc.collect()
        with _traced() as taken:
            ends += [self._start() for _ in range(count)]
            await self._meet()
            gc.collect()
            open_bytes = taken()[0]
        await self._meet()
        for end in ends:
            end.abort("the benchmark is done")
            await end.drained()
        return {"bytes": open_bytes / count}

    def _start(self) -> End:
        pool = self.memory.pool
        assert pool is not None
        number, block = next(self.ends.ids), pool.blocks[:1]
        if self.b.left:
            return self.ends.connection.pull(number, pool.cache, block)
        return self.ends.communicator.publish(number, pool.cache, block)

    async def _move(self) -> None:
        moves = OpsRound(self.b, self.ends, self.memory, self.work, ())
        await moves.move()

    async def _meet(self) -> None:
        """Wait until both sides are here, over the connection that is measured."""
        sent = asyncio.ensure_future(self._send_go())
        await self.ends.connection.recv(_GO)
        await sent

    async def _send_go(self) -> None:
        await self.ends.connection.send(_GO, b"")


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
