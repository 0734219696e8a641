"""``kvwire bench ops``: what one operation costs, in time and in CPU of each side."""

from __future__ import annotations

from typing import Final

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
    OpsSide,
    OpsWork,
)
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.report import COMMON, Common, Rounds
from kvwire.cli.bench.store_side import (
    SERVER,
    StoreServerSide,
    StoreSide,
    StoreWork,
)
from kvwire.cli.bench.turns import (
    MICROSECONDS,
    Benchmark,
    Case,
    CaseResult,
    Findings,
)
from kvwire.limits import KIB, MIB
from kvwire.types import in_bytes

# Operations of a round: enough that what comes seldom, such as CREDIT, has its share.
COUNT: Final = 40


def operations() -> dict[str, OpsWork]:
    """Return all but those of a store, by the name of their row."""
    kib64 = 64 * KIB
    works = [
        OpsWork(verb=verb, nbytes=nbytes, count=COUNT, layers=layers, blocks=blocks)
        for verb, nbytes, blocks, layers in (
            (PULL, kib64, 1, 16),
            (PULL, 256 * KIB, 2, 16),
            (PUSH, 256 * KIB, 2, 16),
            (PUSH, 4 * MIB, 2, 32),
        )
    ]
    works += [
        OpsWork(verb=READY, nbytes=80 * kib64, count=1, layers=80),
        OpsWork(verb=ROUND_TRIP, nbytes=64, count=10 * COUNT),
        OpsWork(verb=SEND, nbytes=kib64, count=COUNT),
        OpsWork(verb=SEND, nbytes=MIB, count=COUNT),
        OpsWork(verb=PUT, nbytes=kib64, count=COUNT),
        OpsWork(verb=GET, nbytes=kib64, count=COUNT),
    ]
    return {work.name: work for work in works}


def store_operations() -> dict[str, StoreWork]:
    """Return one block into a store server and out of it, likewise."""
    return {
        f"store {verb}, {in_bytes(nbytes)}": StoreWork(
            verb=verb, nbytes=nbytes, count=COUNT, tier=SERVER, layers=16, set_blocks=1
        )
        for nbytes in (64 * KIB, MIB)
        for verb in (PUT, GET)
    }


def sides_cpu_s(row: CaseResult) -> list[float]:
    """Return CPU seconds of an operation, of the side that asks and of the other."""
    samples = row.samples.get(row.case.ours[0].name)
    if samples is None:
        return []
    return [cpu_s / len(samples.rounds[0]) for cpu_s in samples.sides_cpu_s]


def table_of(findings: Findings) -> list[RenderableType]:
    """Make a table of the CPU that each operation takes."""
    table = report.new_table("of one operation", "CPU us", "of the other side")
    for row in findings:
        table.add_row(row.case.name, *(f"{1e6 * s:.0f}" for s in sides_cpu_s(row)))
    return [Text(), table]


def command(
    *,
    transport: str = "tcp",
    rounds: Rounds = 5,
    common: Common = COMMON,
) -> int:
    """Measure one operation: its time, and the CPU of each side.

    Transfers; one layer of many; messages, put and get; a block into a store server
    and out of it.

    Args:
        transport: The transport of kvwire; of a store, what its server offers.
        rounds: How often everything is measured.
        common: Options of every benchmark.
    """
    report.require_known([transport])
    name, loop = f"kvwire {transport}", {"loop": common.loop}
    ours = Contender(name, OpsSide, options={"transport": transport, **loop})
    store = Contender(
        name,
        StoreSide,
        StoreServerSide,
        environment={"KVWIRE_REQUIRE": transport},
        options={"tier": SERVER, **loop},
    )
    streams = Contender(f"{common.loop} streams", StreamsSide, options=loop)
    works = {**operations(), **store_operations()}
    benchmark = Benchmark(
        name="ops",
        cases=[
            Case(
                name=name,
                work=work,
                unit=MICROSECONDS,
                ours=[store if isinstance(work, StoreWork) else ours],
                beside=[streams] if work.verb == ROUND_TRIP else [],
            )
            for name, work in works.items()
        ],
        notes=["CPU: of the side that asks, and of the other."],
        below=table_of,
        more=lambda found: {
            "cpu_s": {row.case.name: sides_cpu_s(row) for row in found}
        },
    )
    return common.run(benchmark, transport=transport, rounds=rounds)
