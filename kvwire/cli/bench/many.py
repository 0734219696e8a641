"""``kvwire bench many``: many transfers at once, and a small one beside large ones.

It shows whether a short prompt has to wait for another request's long prompt. Times are
measured at the pulling side, from the call to the outcome.

Every transfer has its own blocks, scattered over one cache. Only the blocks of the
``others`` exist just once at the publishing side, like a prefix that they share. A
block is 64 KiB in 16 layers, so all data moves in fragments of 4 KiB.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Final

import numpy as np
from rich.console import RenderableType
from rich.text import Text

import kvwire
from kvwire.cli.bench.operations import (
    RIGHT,
    BenchMemory,
    End,
    Ends,
    OpsWork,
    joined,
    mark_all,
    over,
    paged,
)
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.report import (
    COMMON,
    Common,
    Mebibytes,
    Rounds,
    require_able,
    within,
)
from kvwire.cli.bench.side import Bench, Seconds, digest
from kvwire.cli.bench.turns import MILLISECONDS, Benchmark, Case, CaseResult, Findings
from kvwire.limits import KIB, MIB
from kvwire.types import in_bytes

LAYERS: Final = 16
LAYER_BYTES: Final = 4 * KIB
BLOCK_BYTES: Final = LAYERS * LAYER_BYTES
# Of 100 transfers: prompts of 16 tokens, prompts of 256 tokens, and long ones.
SMALL_BYTES: Final = BLOCK_BYTES
MEDIUM_BYTES: Final = 1 * MIB
MEDIUM_SHARE: Final = 0.18
LARGE_SHARE: Final = 0.02
# The least number of samples whose 99th percentile is not simply the slowest one.
TIMED: Final = 101
# Between the priority of the other transfers and the highest priority.
URGENT: Final = 1
AT_ONCE: Final = "at once"
ONE_BY_ONE: Final = "one by one"
BESIDE: Final = "beside"
# How many are published before they are pulled, so that no pull waits for that.
_AHEAD: Final = 4

Endpoints = Annotated[int, within(1, 32)]
Transfers = Annotated[int, within(10, 100_000)]
Others = Annotated[int, within(1, 64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyWork(OpsWork):
    """``count`` transfers; ``verb`` is one of the names above.

    * ``at once``: all of them begin together, spread over all connections; ``nbytes``
      is the size of the largest;
    * ``one by one``: each has ``nbytes``, and begins when the previous one has ended;
    * ``beside``: the same, while ``others`` of priority 0 always run on the same
      connection.
    """

    others: int = 0
    other_bytes: int = 0
    priority: int = 0

    def sizes(self) -> list[int]:
        """Return the bytes of each transfer, in the order in which they begin."""
        if self.verb != AT_ONCE:
            return [self.nbytes] * self.count
        large = max(1, round(self.count * LARGE_SHARE))
        medium = max(1, round(self.count * MEDIUM_SHARE))
        sizes = np.full(self.count, SMALL_BYTES)
        sizes[:medium] = MEDIUM_BYTES
        sizes[medium : medium + large] = self.nbytes
        mixed: list[int] = np.random.default_rng(0).permutation(sizes).tolist()
        return mixed

    @property
    def moved_bytes(self) -> int:
        """The bytes that a round moves, without the bytes of the ``others``."""
        return sum(self.sizes())

    def shares(self, *, publishes: bool) -> tuple[list[list[int]], list[list[int]]]:
        """Return the blocks of each timed transfer, and of each of the ``others``.

        All transfers that are timed one by one share the same blocks. At the side that
        ``publishes``, so do the others.
        """
        own = self.sizes() if self.verb == AT_ONCE else [self.nbytes]
        different = min(self.others, 1) if publishes else self.others
        counts = np.array(own + [self.other_bytes] * different) // BLOCK_BYTES
        order = np.random.default_rng(1).permutation(counts.sum())
        parts = [part.tolist() for part in np.split(order, np.cumsum(counts)[:-1])]
        others = parts[len(own) :] * (self.others if publishes else 1)
        return parts[: len(own)], others


class ManyMemory(BenchMemory):
    """One cache for all transfers of a side.

    Attributes:
        cache: The cache, with blocks of 64 KiB.
        own: The blocks of each timed transfer.
        others: The blocks of each of the other transfers.
    """

    cache: kvwire.PagedCache
    own: list[list[int]]
    others: list[list[int]]

    def lay_out(self, work: ManyWork) -> None:
        publishes = self.side == RIGHT
        self.own, self.others = work.shares(publishes=publishes)
        different = self.others[:1] if publishes else self.others
        blocks = sum(map(len, [*self.own, *different]))
        self.take(blocks * BLOCK_BYTES)
        self.cache = paged(self.bytes, LAYERS, blocks)

    def forget(self) -> None:
        super().forget()
        vars(self).pop("cache", None)

    def digest(self) -> str:
        """Return a digest of the timed blocks; the others may not be complete."""
        layers = self.bytes.reshape(LAYERS, -1, LAYER_BYTES)
        return digest(layers[:, np.concatenate(self.own)].copy())


async def many(b: Bench) -> None:
    """Pull many transfers on the left, all published by the right side."""
    memory = ManyMemory(b)
    async with joined(b) as ends:
        async for work in b.works(ManyWork):
            await asyncio.to_thread(memory.have, work)
            crowd = Crowd(b, ends, memory, work, f"{next(ends.ids)}")
            if b.checks:
                await memory.fill()
            seconds: Seconds = ()
            async with b.clock():
                if b.left:
                    seconds = await crowd.pull_all()
                else:
                    await crowd.publish_all()
            await b.report(seconds, await memory.digested(b.checks))
    memory.close()


@dataclass(frozen=True, slots=True)
class Crowd:
    """Runs one round; its transfers have the same names on both sides."""

    b: Bench
    ends: Ends
    memory: ManyMemory
    work: ManyWork
    name: str

    async def pull_all(self) -> Seconds:
        """Left side: pull, and return the seconds of each transfer, in order."""
        work = self.work

        async def pulled(number: int) -> float:
            at = number % len(self.memory.own)
            began = time.perf_counter()
            blocks = self.memory.own[at]
            await over(self._pull(f"{number}", blocks, at, work.priority))
            return time.perf_counter() - began

        await self.b.receive()  # the other side has published
        async with self._beside(self._pull):
            if work.verb == AT_ONCE:
                seconds = await asyncio.gather(*map(pulled, range(work.count)))
            else:
                seconds = [await pulled(number) for number in range(work.count)]
            await self.b.send()  # lets the others end
        return seconds

    async def publish_all(self) -> None:
        """Right side: publish each transfer before it is pulled."""
        work = self.work
        ahead = work.count if work.verb == AT_ONCE else min(_AHEAD, work.count)

        def published(number: int) -> kvwire.Outgoing:
            at = number % len(self.memory.own)
            return self._publish(f"{number}", self.memory.own[at], at)

        async with self._beside(self._publish):
            outgoing = deque(map(published, range(ahead)))
            await self.b.send()
            for number in range(ahead, work.count):
                await over(outgoing.popleft())
                outgoing.append(published(number))
            for one in outgoing:
                await over(one)
            await self.b.receive()

    def _pull(
        self, id: str, blocks: Sequence[int], at: int = 0, priority: int = 0
    ) -> kvwire.Incoming:
        connection = self.ends.connections[at % len(self.ends.connections)]
        name = f"{self.name}-{id}"
        cache = self.memory.cache
        return connection.pull(name, cache, blocks, priority=priority)

    def _publish(self, id: str, blocks: Sequence[int], at: int = 0) -> kvwire.Outgoing:
        """Publish at the communicator whose connection the pull uses."""
        communicators = self.ends.communicators
        connections = self.ends.connections
        publish = communicators[at % len(connections) // len(communicators)].publish
        return mark_all(publish(f"{self.name}-{id}", self.memory.cache, blocks))

    @asynccontextmanager
    async def _beside(
        self, begin: Callable[[str, Sequence[int]], End]
    ) -> AsyncIterator[None]:
        """Keep one end of each other transfer running; abort the last ones at exit."""

        async def keep(index: int, blocks: Sequence[int]) -> None:
            for number in itertools.count():
                end = begin(f"other-{index}-{number}", blocks)
                try:
                    await end.drained()
                except asyncio.CancelledError:
                    end.abort("the benchmark is done")
                    await end.drained()
                    raise

        async with asyncio.TaskGroup() as group:
            others = enumerate(self.memory.others)
            tasks = [group.create_task(keep(*one)) for one in others]
            yield
            for task in tasks:
                task.cancel()


def by_size(finding: CaseResult) -> Findings:
    """Split one case into a row per transfer size."""
    if finding.case.group != AT_ONCE:
        return [finding]
    sizes = finding.case.work.sizes()

    def of(nbytes: int) -> CaseResult:
        name = f"{finding.case.name}: {in_bytes(nbytes)}"
        chosen = [size == nbytes for size in sizes]
        return finding.part(name, lambda v: [*itertools.compress(v, chosen)])

    return [of(nbytes) for nbytes in sorted(set(sizes))]


def to_alone(findings: Findings) -> list[RenderableType]:
    """Compare the 99th percentile beside other transfers with the one without them."""
    lines: list[RenderableType] = []
    alone = {
        (name, f.case.work.nbytes): samples.p99
        for f in findings
        if f.case.group == ONE_BY_ONE
        for name, samples in f.samples.items()
    }
    for finding in findings:
        for name, samples in finding.samples.items():
            base = alone.get((name, finding.case.work.nbytes))
            if finding.case.group == BESIDE and base is not None:
                times = f"{samples.p99 / base:.1f} times alone"
                lines.append(Text(f"{name}, {finding.case.name}: p99 {times}"))
    return lines


def command(
    *,
    transport: str = "tcp",
    endpoints: Endpoints = 16,
    transfers: Transfers = 1000,
    large_mib: Mebibytes = 4,
    others: Others = 8,
    other_mib: Mebibytes = 16,
    rounds: Rounds = 3,
    common: Common = COMMON,
) -> int:
    """Measure many transfers at once, and a small one beside large ones.

    Everything travels in fragments of 4 KiB. With --other-mib 1024, the pulling side
    uses 8 GiB of memory. The publishing side uses 1 GiB, which all of these transfers
    read.

    Args:
        transport: Transports that join two processes, separated by commas.
        endpoints: Communicators per side; each is connected to all of the other side's.
        transfers: The number of transfers that begin at once. Of 100 transfers, 80 have
            64 KiB, 18 have 1 MiB and 2 have --large-mib.
        large_mib: MiB of each large transfer.
        others: The number of transfers that always run beside the timed one.
        other_mib: MiB of each transfer beside the timed one.
        rounds: The number of rounds; percentiles are taken over all of them.
        common: Options of every benchmark.
    """
    transports = require_able(transport.split(","))
    options = {"loop": common.loop, "endpoints": endpoints}
    pairs = [
        Contender(f"kvwire {name}", many, options={"transport": name, **options})
        for name in transports
    ]
    medium = in_bytes(MEDIUM_BYTES)
    crowd = f"beside {others} x {other_mib} MiB"
    alone = ManyWork(verb=ONE_BY_ONE, nbytes=MEDIUM_BYTES, count=TIMED)
    beside = replace(alone, verb=BESIDE, others=others, other_bytes=other_mib * MIB)
    at_once = ManyWork(verb=AT_ONCE, nbytes=large_mib * MIB, count=transfers)
    works = {
        f"{medium} alone": alone,
        f"{medium} {crowd}": beside,
        f"{medium} {crowd}, priority {URGENT}": replace(beside, priority=URGENT),
        f"{in_bytes(SMALL_BYTES)} alone": replace(alone, nbytes=SMALL_BYTES),
        f"{transfers} at once": at_once,
    }
    benchmark = Benchmark(
        name="many",
        cases=[
            Case(name=n, work=w, unit=MILLISECONDS, ours=pairs, group=w.verb, tail=True)
            for n, w in works.items()
        ],
        notes=[f"{endpoints} x {endpoints} connections. From call to outcome."],
        split=by_size,
        below=to_alone,
    )
    settings = {"endpoints": endpoints, "transfers": transfers, "large_mib": large_mib}
    settings |= {"others": others, "other_mib": other_mib, "rounds": rounds}
    return common.run(benchmark, transport=transports, **settings)
