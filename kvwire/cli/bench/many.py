"""``kvwire bench many``: many transfers at once, and a small one beside large ones.

What is asked is whether anybody has to wait for somebody else's long prompt. Times are
from the call to the outcome, at the side that pulls.

Every transfer has blocks of its own, scattered over one cache; only the side that
publishes has the blocks of the others beside once, as a prefix that all of them want. A
block is 64 KiB in 16 layers, so everything travels in fragments of 4 KiB.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

import numpy as np
from rich.console import RenderableType
from rich.text import Text

import kvwire
from kvwire.cli.bench.operations import (
    RIGHT,
    End,
    OpsSide,
    OpsWork,
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
from kvwire.cli.bench.side import Work, digest
from kvwire.cli.bench.turns import MILLISECONDS, Benchmark, Case, CaseResult, Findings
from kvwire.limits import KIB, MIB
from kvwire.types import in_bytes

LAYERS: Final = 16
LAYER_BYTES: Final = 4 * KIB
BLOCK_BYTES: Final = LAYERS * LAYER_BYTES
# Of 100 transfers: prompts of 16 tokens, of 256, and one that is long.
SMALL_BYTES: Final = BLOCK_BYTES
MEDIUM_BYTES: Final = 1 * MIB
MEDIUM_SHARE: Final = 0.18
LARGE_SHARE: Final = 0.02
# The least whose 99th percentile is not simply the slowest.
TIMED: Final = 101
# Between the priority of those beside it and the highest there is.
URGENT: Final = 1
AT_ONCE: Final = "at once"
ONE_BY_ONE: Final = "one by one"
BESIDE: Final = "beside"
_GO: Final = 1
_STOP: Final = 2
# Published before they are pulled, so that nobody waits for the other side's loop.
_AHEAD: Final = 4

Endpoints = Annotated[int, within(1, 32)]
Transfers = Annotated[int, within(10, 100_000)]
Others = Annotated[int, within(1, 64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyWork(OpsWork):
    """``count`` transfers; ``verb`` is one of those above.

    * ``at once``: all of them begin together, spread over all connections; ``nbytes``
      is the size of the largest;
    * ``one by one``: each of ``nbytes``, begun when the one before is over;
    * ``beside``: likewise, and on the same connection ``others`` are always under way,
      whose priority is 0.
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
        """Count the bytes of a round, without those of the others."""
        return sum(self.sizes())

    def shares(self, *, publishes: bool) -> tuple[list[list[int]], list[list[int]]]:
        """Say which blocks of one side's cache each has that is timed, and each other.

        Those that are timed one by one have the same. At the side that ``publishes``
        so have the others.
        """
        own = self.sizes() if self.verb == AT_ONCE else [self.nbytes]
        different = min(self.others, 1) if publishes else self.others
        counts = np.array(own + [self.other_bytes] * different) // BLOCK_BYTES
        order = np.random.default_rng(1).permutation(counts.sum())
        parts = [part.tolist() for part in np.split(order, np.cumsum(counts)[:-1])]
        others = parts[len(own) :] * (self.others if publishes else 1)
        return parts[: len(own)], others


class ManySide(OpsSide):
    """Runs some communicators on each side, every one connected to every other."""

    work_type: ClassVar[type[Work]] = ManyWork
    _cache: kvwire.PagedCache
    # The blocks of those that are timed, and of the others beside.
    _own: list[list[int]]
    _others: list[list[int]]

    def have(self, work: OpsWork, side: int) -> None:
        assert isinstance(work, ManyWork)
        if self._work == work:
            return
        publishes = side == RIGHT
        self._own, self._others = work.shares(publishes=publishes)
        different = self._others[:1] if publishes else self._others
        blocks = sum(map(len, [*self._own, *different]))
        self.take(blocks * BLOCK_BYTES)
        self._cache = paged(self.memory, LAYERS, blocks)
        self._work = work

    def forget(self) -> None:
        super().forget()
        vars(self).pop("_cache", None)

    async def digest(self, work: OpsWork) -> str:
        """Hash the blocks that are timed: the others need not come to their end."""
        own = np.concatenate(self._own)
        layers = self.memory.reshape(LAYERS, -1, LAYER_BYTES)
        return await asyncio.to_thread(lambda: digest(layers[:, own].copy()))

    async def drive(self, work: OpsWork) -> Sequence[float]:
        """Left: the seconds of each transfer, in their order."""
        assert isinstance(work, ManyWork)
        first, priority = self.next_id(), work.priority

        async def pulled(number: int) -> float:
            at, began = number % len(self._own), time.perf_counter()
            pull = self._pull(f"{first}-{number}", self._own[at], at, priority)
            await over(pull)
            return time.perf_counter() - began

        await self.connection.recv(_GO)
        async with self._beside(f"{first}-other", self._pull):
            if work.verb == AT_ONCE:
                seconds = await asyncio.gather(*map(pulled, range(work.count)))
            else:
                seconds = [await pulled(number) for number in range(work.count)]
            await self.connection.send(_STOP, b"")
        return seconds

    async def serve(self, work: OpsWork) -> None:
        first = self.next_id()
        ahead = work.count if work.verb == AT_ONCE else min(_AHEAD, work.count)

        def published(number: int) -> kvwire.Outgoing:
            at = number % len(self._own)
            return self._publish(f"{first}-{number}", self._own[at], at)

        async with self._beside(f"{first}-other", self._publish):
            outgoing = deque(map(published, range(ahead)))
            await self.connection.send(_GO, b"")
            for number in range(ahead, work.count):
                await over(outgoing.popleft())
                outgoing.append(published(number))
            for one in outgoing:
                await over(one)
            await self.connection.recv(_STOP)

    def _pull(
        self, id: str, blocks: Sequence[int], at: int = 0, priority: int = 0
    ) -> kvwire.Incoming:
        connection = self.connections[at % len(self.connections)]
        return connection.pull(id, self._cache, blocks, priority=priority)

    def _publish(self, id: str, blocks: Sequence[int], at: int = 0) -> kvwire.Outgoing:
        """Publish at whoever has that connection."""
        number = at % len(self.connections) // len(self.communicators)
        return mark_all(self.communicators[number].publish(id, self._cache, blocks))

    @asynccontextmanager
    async def _beside(
        self, name: str, begin: Callable[[str, Sequence[int]], End]
    ) -> AsyncIterator[None]:
        """Keep one end of each of the others under way; the last ones are given up."""

        async def keep(index: int, blocks: Sequence[int]) -> None:
            for number in itertools.count():
                end = begin(f"{name}-{index}-{number}", blocks)
                try:
                    await end.drained()
                except asyncio.CancelledError:
                    end.abort("the benchmark has what it needs")
                    await end.drained()
                    raise

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(keep(*one)) for one in enumerate(self._others)]
            yield
            for task in tasks:
                task.cancel()


def by_size(finding: CaseResult) -> Findings:
    """Make a row of each size of transfers of one case."""
    if finding.case.group != AT_ONCE:
        return [finding]
    sizes = finding.case.work.sizes()

    def of(nbytes: int) -> CaseResult:
        name = f"{finding.case.name}: {in_bytes(nbytes)}"
        chosen = [size == nbytes for size in sizes]
        return finding.part(name, lambda v: [*itertools.compress(v, chosen)])

    return [of(nbytes) for nbytes in sorted(set(sizes))]


def to_alone(findings: Findings) -> list[RenderableType]:
    """Say how much longer a transfer takes beside others, by 99th percentiles."""
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

    Everything travels in fragments of 4 KiB. With --other-mib 1024, the side that pulls
    has 8 GiB of memory, and the one that publishes 1 GiB, which all the others want.

    Args:
        transport: Of kvwire, separated by commas; those that join two processes.
        endpoints: Communicators on each side; each is connected to each.
        transfers: How many begin at once: 80 of 100 have 64 KiB, 18 have 1 MiB.
        large_mib: MiB of the other two of 100.
        others: How many are always under way beside the one that is timed.
        other_mib: MiB of each of them.
        rounds: How often everything is measured; percentiles are of all rounds.
        common: Options of every benchmark.
    """
    transports = require_able(transport.split(","))
    options = {"loop": common.loop, "endpoints": endpoints}
    pairs = [
        Contender(f"kvwire {name}", ManySide, options={"transport": name, **options})
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
        notes=[f"{endpoints} x {endpoints} connections. From the call to the outcome."],
        split=by_size,
        below=to_alone,
    )
    settings = {"endpoints": endpoints, "transfers": transfers, "large_mib": large_mib}
    settings |= {"others": others, "other_mib": other_mib, "rounds": rounds}
    return common.run(benchmark, transport=transports, **settings)
