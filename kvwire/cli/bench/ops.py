"""``kvwire bench ops``: what one operation costs, and what it consists of.

Calls of Python, frames and system calls are counted with both sides on one loop of this
process, so nothing depends on whose turn it is on a CPU, and the counts of two runs are
the same but for a wake-up more or less. What the loop itself does is not counted: it is
another one in each engine.
"""

from __future__ import annotations

import asyncio
import cProfile
import secrets
import selectors
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Final

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

import kvwire
from kvwire.cli.bench import report
from kvwire.cli.bench.fragments import LEFT, RIGHT, FragmentWork, Pool
from kvwire.cli.bench.messages import StreamsSide
from kvwire.cli.bench.pair import Contender, Work
from kvwire.cli.bench.report import COMMON, Common, Rounds, size_name
from kvwire.cli.bench.side import (
    ConnectedSide,
    End,
    JoinedSide,
    digest,
    fill,
    mark_all,
    over,
    require_complete,
    require_same,
    serve_store,
)
from kvwire.cli.bench.turns import (
    MICROSECONDS,
    Benchmark,
    Case,
    CaseResult,
    Findings,
    compare,
)
from kvwire.limits import KIB, MIB
from kvwire.proto.framing import Framing
from kvwire.wire.header import FrameType

PULL: Final = "pull"
PUSH: Final = "push"
READY: Final = "ready"
ROUND_TRIP: Final = "round trip"
SEND: Final = "send"
PUT: Final = "put"
GET: Final = "get"
STORE_PUT: Final = "store put"
STORE_GET: Final = "store get"
STORES: Final = (STORE_PUT, STORE_GET)

# Operations of a round, and those that are counted: enough that what comes seldom,
# such as CREDIT, has its share.
COUNT: Final = 40
# Connections are dearer than what is done on them.
FRESH_COUNT: Final = 10

_GO: Final = 1
_DONE: Final = 2
_DATA: Final = 3
_BACK: Final = 4
# Ends that the right side has ready before they are asked for.
_AHEAD: Final = 2
# A layer is computed meanwhile, so that each travels by itself.
_GAP_S: Final = 1e-3
# What is got is not in the memory in front of the server, and still in the server's.
_FRONT_BLOCKS: Final = 4
_GOT_BLOCKS: Final = 16
_SERVED_BLOCKS: Final = 256
_HASH_BYTES: Final = 32

_SOCKET: Final = "of '_socket.socket' objects>"
# Functions of ours that are one system call, by file and name.
_CALLS: Final = {("iovec.py", "readv"), ("iovec.py", "writev"), ("cma.py", "read")}
# Whose calls are not counted: the benchmark's own, and those of a loop in Python.
_OUTSIDE: Final = (
    str(Path(__file__).parent),
    str(Path(asyncio.__file__).parent),
    str(Path(selectors.__file__)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsWork(Work):
    """``count`` operations of ``nbytes``, one after the other."""

    # Of the cache; 0 where there is none.
    layers: int = 0
    # Of a transfer; they do not lie side by side.
    blocks: int = 1
    # Each on a connection of its own.
    fresh: bool = False

    @property
    def transfer(self) -> FragmentWork:
        """One operation as fragments."""
        count = self.layers * self.blocks
        nbytes = self.nbytes // count
        return FragmentWork(verb=PUSH, nbytes=nbytes, count=count, layers=self.layers)

    @property
    def name(self) -> str:
        """As it is shown."""
        whole = self.nbytes >= KIB
        size = size_name(self.nbytes) if whole else f"{self.nbytes} B"
        if self.verb == READY:
            return f"ready of a layer, {size_name(self.nbytes // self.layers)}"
        if self.verb not in (PULL, PUSH):
            return f"{self.verb}, {size}"
        return f"{'first ' * self.fresh}{self.verb}, {size}, {self.layers} layers"


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
    first = OpsWork(verb=PULL, nbytes=kib64, count=FRESH_COUNT, layers=16, fresh=True)
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


class Meter:
    """Adds up the CPU seconds of the parts of a round that count."""

    def __init__(self) -> None:
        self.cpu_s: float = 0.0
        self._began_s = 0.0

    def start(self) -> None:
        """From here on it counts."""
        self._began_s = time.process_time()

    def stop(self) -> None:
        """Up to here."""
        self.cpu_s += time.process_time() - self._began_s


class OpsSide(ConnectedSide[OpsWork]):
    """Operations one by one: the left side does them, the right one is the other end.

    A ``meter`` is made to measure each round.
    """

    work_type: ClassVar[type[Work]] = OpsWork
    _pool: Pool
    _grant: kvwire.Grant

    def __init__(
        self, options: Mapping[str, str], meter: Callable[[], Meter] = Meter
    ) -> None:
        super().__init__(options)
        self._new_meter = meter
        self.meter: Meter = meter()
        self._open = AsyncExitStack()
        self._shape: tuple[object, ...] = ()
        self._memory = np.zeros(0, np.uint8)
        self._stores: dict[int, kvwire.BlockStore] = {}
        self._hashes: list[bytes] = []
        # Digest of what is put into a store.
        self._put_digest = ""

    async def prepare(self, work: OpsWork) -> dict[str, str]:
        self._have(work, RIGHT)
        if work.verb in STORES:
            size, slab = work.nbytes * _SERVED_BLOCKS, work.nbytes * _GOT_BLOCKS
            tier = f"memory:{size}B?slab={slab}B"
            return {"store": await serve_store(self._open, tier)}
        if work.verb not in (PUT, GET):
            return {}
        region = self.communicator.register(self._memory, access="readwrite")
        return {"grant": region.grant(self.connection).to_bytes().hex()}

    async def use(self, work: OpsWork, given: dict[str, str]) -> None:
        self._have(work, LEFT)
        if "grant" in given:
            self._grant = kvwire.Grant.from_bytes(bytes.fromhex(given["grant"]))
        if "store" in given and work.nbytes not in self._stores:
            front = work.nbytes * _FRONT_BLOCKS
            tiers = [f"memory:{front}B?slab={front}B", f"kvwire://{given['store']}"]
            opening = kvwire.BlockStore.open(tiers)
            self._stores[work.nbytes] = await self._open.enter_async_context(opening)

    async def fill(self, work: OpsWork) -> None:
        await fill(self._memory)
        self._hashes = []
        self._put_digest = self._digest(work)

    async def digest(self, work: OpsWork) -> str:
        return "" if work.verb in STORES else self._digest(work)

    async def verify(self, work: OpsWork) -> None:
        """Compare what a store gives back; the first round of all has bytes to tell."""
        if work.verb in STORES and self._put_digest:
            self._memory[:] = 0
            await self._store_get(work)
            require_same(self._digest(work), self._put_digest)

    async def drive(self, work: OpsWork) -> dict[str, Any]:
        self.meter = meter = self._new_meter()
        await self.connection.recv(_GO)
        if work.verb == STORE_GET and not self._hashes:
            for _ in range(_GOT_BLOCKS):
                await self._store_put(work)
        one_by_one = self._mark_layers if work.verb == READY else self._one_by_one
        values = await one_by_one(work)
        await self.connection.send(_DONE, b"")
        return {"values": values, "cpu_s": meter.cpu_s}

    async def serve(self, work: OpsWork) -> dict[str, Any]:
        """Right: the CPU is of all operations, with their connections if fresh."""
        self.meter = meter = self._new_meter()
        if work.verb == READY:
            await self._see_layers(work)
        else:
            meter.start()
            await self._answer(work)
            meter.stop()
        return {"cpu_s": meter.cpu_s}

    async def close(self) -> None:
        await self._open.aclose()
        await super().close()

    def _have(self, work: OpsWork, side: int) -> None:
        """Have the memory of a work, as a cache where it has one."""
        shape = work.verb, work.nbytes, work.layers, work.blocks
        if self._shape == shape:
            return
        self._shape, self._hashes, self._put_digest = shape, [], ""
        nbytes = work.transfer.pool_bytes if work.layers else work.nbytes
        self._memory = np.ones(nbytes, np.uint8)
        if work.layers:
            self._pool = Pool(self._memory, work.transfer, side)

    def _digest(self, work: OpsWork) -> str:
        return self._pool.digest() if work.layers else digest(self._memory)

    # --- left -------------------------------------------------------------------------

    async def _one_by_one(self, work: OpsWork) -> list[float]:
        """Leave the first one uncounted, so that the last one's tail need not be."""
        clock, values, meter = time.perf_counter, [], self.meter
        connection = self.connection
        if not work.fresh:
            await self._once(work, connection)
            meter.start()
        for _ in range(work.count):
            if work.fresh:
                connection = await self.one_more()
                meter.start()
            began = clock()
            await self._once(work, connection)
            values.append(clock() - began)
            if work.fresh:
                meter.stop()
                await connection.close()
        if not work.fresh:
            meter.stop()
        return values

    async def _once(self, work: OpsWork, connection: kvwire.Connection) -> None:
        match work.verb:
            case "pull":
                blocks = self._pool.cache, self._pool.blocks
                await over(connection.pull(self.next_id(), *blocks))
            case "push":
                blocks = self._pool.cache, self._pool.blocks
                await over(mark_all(connection.push(self.next_id(), *blocks)))
            case "put":
                await connection.put(self._memory, self._grant)
            case "get":
                await connection.get(self._grant, into=self._memory)
            case "store put":
                await self._store_put(work)
            case "store get":
                await self._store_get(work)
            case _:
                await connection.send(_DATA, self._memory)
                if work.verb == ROUND_TRIP:
                    await connection.recv(_BACK, self._memory)

    async def _store_put(self, work: OpsWork) -> None:
        store, name = self._stores[work.nbytes], secrets.token_bytes(_HASH_BYTES)
        self._hashes.append(name)
        require_complete(await store.put([name], self._pool.cache, self._pool.blocks))
        await store.flush()

    async def _store_get(self, work: OpsWork) -> None:
        name = self._hashes.pop(0)
        self._hashes.append(name)
        store, pool = self._stores[work.nbytes], self._pool
        require_complete(await store.get([name], pool.cache, pool.blocks))

    async def _mark_layers(self, work: OpsWork) -> list[float]:
        pool = self._pool
        end = self.connection.push(
            self.next_id(), pool.cache, pool.blocks, group_bytes=1
        )
        end.ready(0)
        await asyncio.sleep(_GAP_S)
        clock, values = time.perf_counter, []
        self.meter.start()
        for layer in range(1, work.layers):
            began = clock()
            end.ready(layer)
            values.append(clock() - began)
            await asyncio.sleep(_GAP_S)
        self.meter.stop()
        end.finish()
        await over(end)
        return values

    # --- right ------------------------------------------------------------------------

    async def _answer(self, work: OpsWork) -> None:
        connection, memory = self.connection, self._memory
        await connection.send(_GO, b"")
        count = work.count + (not work.fresh)
        if work.verb in (PULL, PUSH):
            ends = [self._offer(work) for _ in range(min(_AHEAD, count))]
            for number in range(count):
                await over(ends.pop(0))
                if number + _AHEAD < count:
                    ends.append(self._offer(work))
        elif work.verb in (ROUND_TRIP, SEND):
            for _ in range(count):
                await connection.recv(_DATA, memory)
                if work.verb == ROUND_TRIP:
                    await connection.send(_BACK, memory)
        await connection.recv(_DONE)

    async def _see_layers(self, work: OpsWork) -> None:
        end = self._offer(work)
        await self.connection.send(_GO, b"")
        assert isinstance(end, kvwire.Incoming)
        await end.layer(0)
        self.meter.start()
        for layer in range(1, work.layers):
            await end.layer(layer)
        self.meter.stop()
        await over(end)
        await self.connection.recv(_DONE)

    def _offer(self, work: OpsWork) -> End:
        number, pool = self.next_id(), self._pool
        if work.verb == PULL:
            return mark_all(self.communicator.publish(number, pool.cache, pool.blocks))
        return self.communicator.expect(number, pool.cache, pool.blocks)


class BareOpsSide(StreamsSide):
    """The streams of asyncio, with the works of this benchmark."""

    work_type: ClassVar[type[Work]] = OpsWork


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


def table_of(findings: Findings, counted: Sequence[Counts]) -> RenderableType:
    """Make a row for each operation, and the names of its frames below."""
    columns = ("wall us", "CPU us", "CPU us", "calls", "system", "frames")
    table = report.new_table("kvwire bench ops: one operation, medians", *columns)
    alike: dict[str, list[str]] = {}
    for row, counts in zip(findings, counted, strict=True):
        case, sides = row.case, sides_cpu_s(row)
        samples = row.samples.get(case.contenders[0].name)
        figures = (counts.calls, counts.system_calls, sum(counts.frames.values()))
        table.add_row(
            case.name,
            f"{1e6 * samples.median:.0f}" if samples else "failed",
            *(["-", "-"] if sides is None else [f"{1e6 * s:.0f}" for s in sides]),
            *(f"{figure:.0f}" for figure in figures),
        )
        alike.setdefault(_frames(counts.frames), []).append(case.name)
        best, ratio = compare(row).best, compare(row).ratio
        if best and ratio:
            wall_us = 1e6 * row.samples[best].median
            text = f"{report.short(ratio)} times that of {best}, {wall_us:.0f} us"
            alike[text] = [case.name]
    lines = [Text(f"{', '.join(names)}: {said}") for said, names in alike.items()]
    return Group(table, Text(), *lines)


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
    streams = Contender(f"{common.loop} streams", BareOpsSide, options=options)
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
        table=lambda found: table_of(found, counted()),
        more=lambda found: {"cases": list(map(row, found, counted()))},
    )
    return common.run(benchmark, transport=transport, rounds=rounds)
