"""``kvwire bench many``: a small transfer beside large ones, on one connection.

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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import RenderableType
from rich.text import Text

import kvwire
from kvwire.cli.bench import report
from kvwire.cli.bench.pair import Contender, Work
from kvwire.cli.bench.report import COMMON, Common, Mebibytes, Rounds, size_name
from kvwire.cli.bench.side import (
    ConnectedSide,
    End,
    digest,
    fill,
    mark_all,
    over,
    paged,
)
from kvwire.cli.bench.turns import MILLISECONDS, Benchmark, Case, Findings
from kvwire.limits import KIB, MIB

LAYERS: Final = 16
LAYER_BYTES: Final = 4 * KIB
BLOCK_BYTES: Final = LAYERS * LAYER_BYTES
# Prompts of 16 tokens, and of 256.
SMALL_BYTES: Final = BLOCK_BYTES
MEDIUM_BYTES: Final = 1 * MIB
# The least whose 99th percentile is not simply the slowest.
TIMED: Final = 101
BESIDE_TARGET: Final = 3.0
# Between the priority of those beside it and the highest there is.
URGENT: Final = 1
ONE_BY_ONE: Final = "one by one"
BESIDE: Final = "beside"
_GO: Final = 1
_STOP: Final = 2
# Published before they are pulled, so that nobody waits for the other side's loop.
_AHEAD: Final = 4

Others = Annotated[int, Parameter(validator=Number(gte=1, lte=64))]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyWork(Work):
    """``count`` transfers of ``nbytes``, each begun when the one before is over.

    Meanwhile ``others`` are always under way, whose priority is 0.
    """

    others: int = 0
    other_bytes: int = 0
    priority: int = 0

    def shares(self, *, publishes: bool) -> tuple[int, list[list[int]]]:
        """Count the blocks that one side needs, and say which transfer has which.

        The first share is of those that are timed. At the side that ``publishes`` the
        others have one share, instead of one each.
        """
        parts = min(self.others, 1) if publishes else self.others
        counts = [
            self.nbytes // BLOCK_BYTES,
            *[self.other_bytes // BLOCK_BYTES] * parts,
        ]
        order = np.random.default_rng(1).permutation(sum(counts))
        own, *others = (p.tolist() for p in np.split(order, np.cumsum(counts)[:-1]))
        return len(order), [own, *others * (self.others if publishes else 1)]


class ManySide(ConnectedSide[ManyWork]):
    """The left side pulls, the right one publishes."""

    work_type: ClassVar[type[Work]] = ManyWork

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._work: ManyWork | None = None
        # Whose blocks are which: those that are timed, then the others beside.
        self.shares: list[list[int]] = []
        self.memory = np.zeros(0, np.uint8)

    async def prepare(self, work: ManyWork) -> None:
        await self._have(work, publishes=True)

    async def use(self, work: ManyWork, given: None) -> None:
        await self._have(work, publishes=False)

    async def fill(self, work: ManyWork) -> None:
        await fill(self.memory)

    async def digest(self, work: ManyWork) -> str:
        """Of the blocks that are timed: the others need not come to their end."""
        layers = self.memory.reshape(LAYERS, -1, LAYER_BYTES)
        return await asyncio.to_thread(lambda: digest(layers[:, self.shares[0]].copy()))

    async def drive(self, work: ManyWork) -> dict[str, Any]:
        """``values`` are seconds of each transfer, in their order."""
        number, clock, values = self.next_id(), time.perf_counter, []
        await self.connection.recv(_GO)
        own, *others = self.shares
        async with self._beside(f"{number}-other", others, self._pull):
            for index in range(work.count):
                began = clock()
                await over(self._pull(f"{number}-{index}", own, priority=work.priority))
                values.append(clock() - began)
            await self.connection.send(_STOP, b"")
        return {"values": values}

    async def serve(self, work: ManyWork) -> dict[str, Any]:
        number = self.next_id()
        own, *others = self.shares
        async with self._beside(f"{number}-other", others, self._publish):
            ids = [f"{number}-{index}" for index in range(work.count)]
            ahead = [self._publish(id, own) for id in ids[:_AHEAD]]
            await self.connection.send(_GO, b"")
            for id in ids[_AHEAD:]:
                await over(ahead.pop(0))
                ahead.append(self._publish(id, own))
            for outgoing in ahead:
                await over(outgoing)
            await self.connection.recv(_STOP)
        return {}

    async def _have(self, work: ManyWork, *, publishes: bool) -> None:
        """Have the memory of a work as a cache; never an old one and a new one at once.

        In a thread: a loop that stands still for long is a dead peer to others.
        """
        if self._work == work:
            return
        blocks, self.shares = work.shares(publishes=publishes)
        nbytes = blocks * BLOCK_BYTES
        if self.memory.size != nbytes:
            vars(self).pop("_cache", None)
            self.memory = np.zeros(0, np.uint8)
            # Written to, so that no page is missing when it is timed.
            self.memory = await asyncio.to_thread(np.ones, nbytes, np.uint8)
        self._cache = paged(self.memory, LAYERS, blocks)
        self._work = work

    def _pull(
        self, id: str, blocks: Sequence[int], *, priority: int = 0
    ) -> kvwire.Incoming:
        return self.connection.pull(id, self._cache, blocks, priority=priority)

    def _publish(self, id: str, blocks: Sequence[int]) -> kvwire.Outgoing:
        return mark_all(self.communicator.publish(id, self._cache, blocks))

    @asynccontextmanager
    async def _beside(
        self,
        name: str,
        others: Sequence[Sequence[int]],
        begin: Callable[[str, Sequence[int]], End],
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
            tasks = [group.create_task(keep(*other)) for other in enumerate(others)]
            yield
            for task in tasks:
                task.cancel()


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
                ratio = samples.p99 / base
                text = Text(
                    f"{name}, {finding.case.name}: p99 {ratio:.1f} times alone, "
                    f"target <= {BESIDE_TARGET:g} "
                )
                lines.append(text + report.verdict(ratio <= BESIDE_TARGET))
    return lines


def command(
    *,
    transport: str = "tcp",
    others: Others = 8,
    other_mib: Mebibytes = 16,
    rounds: Rounds = 3,
    common: Common = COMMON,
) -> int:
    """A small transfer beside many large ones, on the same connection.

    Everything travels in fragments of 4 KiB. With --other-mib 1024, the side that pulls
    has 8 GiB of memory, and the one that publishes 1 GiB, which all the others want.

    Args:
        transport: Of kvwire, separated by commas; those that join two processes.
        others: How many are always under way beside the one that is timed.
        other_mib: MiB of each of them.
        rounds: How often everything is measured; percentiles are of all rounds.
        common: Options of every benchmark.
    """
    transports = transport.split(",")
    report.require_known(transports)
    contenders = [
        Contender(
            f"kvwire {name}",
            ManySide,
            ours=True,
            options={"transport": name, "loop": common.loop},
        )
        for name in transports
    ]
    medium = size_name(MEDIUM_BYTES)
    crowd = f"beside {others} x {other_mib} MiB"
    alone = ManyWork(verb=ONE_BY_ONE, nbytes=MEDIUM_BYTES, count=TIMED)
    beside = replace(alone, verb=BESIDE, others=others, other_bytes=other_mib * MIB)
    works = {
        f"{medium} alone": alone,
        f"{medium} {crowd}": beside,
        f"{medium} {crowd}, priority {URGENT}": replace(beside, priority=URGENT),
        f"{size_name(SMALL_BYTES)} alone": replace(alone, nbytes=SMALL_BYTES),
    }
    benchmark = Benchmark(
        name="many",
        cases=[
            Case(
                name=name,
                work=work,
                unit=MILLISECONDS,
                contenders=contenders,
                group=work.verb,
                tail=True,
            )
            for name, work in works.items()
        ],
        notes=["From the call to the outcome."],
        below=to_alone,
    )
    return common.run(
        benchmark,
        transport=transports,
        others=others,
        other_mib=other_mib,
        rounds=rounds,
    )
