"""``python -m tests.bench control``: the CPU that layers cost, with next to no bytes.

A transfer of 32 layers beside one of 1 layer, both sides together: layers that are
ready within a moment travel together, and with ``group_bytes=1`` each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from rich.text import Text

from kvwire.cli.bench.operations import OpsSide, OpsWork, over
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.report import COMMON, Common, Rounds, require_known
from kvwire.cli.bench.side import Work, each_timed
from kvwire.cli.bench.turns import MILLISECONDS, Benchmark, Case, Findings
from tests.bench.fragments import verdict

LAYERS: Final = 32
LAYER_BYTES: Final = 4
COUNT: Final = 50
TARGET_S: Final = 0.5e-3
_ASKED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlWork(OpsWork):
    """Transfers whose layers are marked one by one."""

    # See publish().
    group_bytes: int | None = None


class ControlSide(OpsSide):
    """Pulls on the left; marks layer by layer on the right, once it has been asked."""

    work_type: ClassVar[type[Work]] = ControlWork

    async def drive(self, work: OpsWork) -> Sequence[float]:
        async def pull(_: int) -> None:
            blocks = self.pool.cache, self.pool.blocks
            incoming = self.connection.pull(self.next_id(), *blocks)
            await self.connection.send(_ASKED, b"")
            await over(incoming)

        return await each_timed(work.count, pull)

    async def serve(self, work: OpsWork) -> None:
        assert isinstance(work, ControlWork)
        for _ in range(work.count):
            outgoing = self.communicator.publish(
                self.next_id(),
                self.pool.cache,
                self.pool.blocks,
                group_bytes=work.group_bytes,
            )
            await self.connection.recv(_ASKED)
            for layer in range(work.layers):
                outgoing.ready(layers=layer)
            outgoing.finish()
            await over(outgoing)


def cpu_s(findings: Findings) -> list[float]:
    """CPU seconds of a transfer, of both sides together."""
    return [
        sum(samples.sides_cpu_s) / one.case.work.count
        for one in findings
        for samples in one.samples.values()
    ]


def added(findings: Findings) -> list[Text]:
    """Say what more layers add, and whether that is what is aimed at."""
    found = cpu_s(findings)
    each = ", ".join(f"{1e3 * s:.2f}" for s in found)
    more_s = found[1] - found[0]
    line = f"CPU of both sides: {each} ms. {LAYERS - 1} more layers add "
    line += f"{1e3 * more_s:.2f} ms, target <= {1e3 * TARGET_S:g} ms: "
    return [Text(line) + verdict(more_s <= TARGET_S)]


def command(
    *, transport: str = "tcp", rounds: Rounds = 15, common: Common = COMMON
) -> int:
    """Measure the CPU that layers of a transfer cost.

    Args:
        transport: The transport.
        rounds: How often everything is measured.
        common: Options of every benchmark.
    """
    require_known([transport])
    options = {"transport": transport, "loop": common.loop, "by_link": 1}
    many = ControlWork(
        verb="pull", nbytes=LAYERS * LAYER_BYTES, count=COUNT, layers=LAYERS, spread=1
    )
    works = {
        "1 tiny layer": replace(many, nbytes=LAYER_BYTES, layers=1),
        f"{LAYERS} of them": many,
        f"{LAYERS}, each sent by itself": replace(many, group_bytes=1),
    }
    ours = [Contender(f"kvwire {transport}", ControlSide, options=options)]
    benchmark = Benchmark(
        name="control",
        cases=[
            Case(name=name, work=work, unit=MILLISECONDS, ours=ours)
            for name, work in works.items()
        ],
        below=added,
        more=lambda found: {"cpu_s": cpu_s(found)},
    )
    return common.run(benchmark, transport=transport, rounds=rounds)
