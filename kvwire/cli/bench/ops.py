"""``kvwire bench ops``, ``messages`` and ``setup``: a connection's operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from kvwire.cli.bench import operations as of
from kvwire.cli.bench import report
from kvwire.cli.bench import store as stores
from kvwire.cli.bench.bare import sockets, streams
from kvwire.cli.bench.operations import OpsWork
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.peer import contender
from kvwire.cli.bench.report import COMMON, Common, Mebibytes, Rounds
from kvwire.cli.bench.side import Work
from kvwire.cli.bench.store import StoreWork
from kvwire.cli.bench.turns import (
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    Benchmark,
    Case,
    CaseResult,
    Findings,
)
from kvwire.limits import KIB, MIB
from kvwire.types import in_bytes

# Operations per round: enough that rare frames, such as CREDIT, count too.
COUNT: Final = 40
# Messages per round.
PING: Final = OpsWork(verb=of.ROUND_TRIP, nbytes=64, count=500)
SIZES: Final = (1 * MIB, 16 * MIB)
# Enough that the wire is never idle between two operations.
IN_FLIGHT: Final = 4
# Connections per round; and a prompt of one block, in 16 layers of 4 KiB.
CONNECTIONS: Final = 20
TRANSFER_BYTES: Final = 64 * KIB
COLUMNS: Final = ("handshake", "first transfer", "second transfer")
_LAYERS: Final = 16


def operations() -> dict[str, OpsWork]:
    """Return all operations except a store's, by the name of their row."""
    kib64 = 64 * KIB
    works = [
        OpsWork(verb=verb, nbytes=nbytes, count=count, layers=layers, blocks=blocks)
        for verb, nbytes, count, layers, blocks in (
            (of.PULL, kib64, COUNT, 16, 1),
            (of.PULL, 256 * KIB, COUNT, 16, 2),
            (of.PUSH, 256 * KIB, COUNT, 16, 2),
            (of.PUSH, 4 * MIB, COUNT, 32, 2),
            (of.READY, 80 * kib64, 1, 80, 1),
            (of.ROUND_TRIP, 64, 10 * COUNT, 0, 1),
            (of.SEND, kib64, COUNT, 0, 1),
            (of.SEND, MIB, COUNT, 0, 1),
            (of.PUT, kib64, COUNT, 0, 1),
            (of.GET, kib64, COUNT, 0, 1),
            (of.GET, kib64, 10 * COUNT, 16, 1),
            (of.GET, 256 * KIB, 10 * COUNT, 16, 2),
        )
    ]
    return {work.name: work for work in works}


def is_window_get(work: Work) -> bool:
    """Return whether a work gets blocks from a window."""
    return isinstance(work, OpsWork) and work.verb == of.GET and work.layers > 0


def store_operations() -> dict[str, StoreWork]:
    """Return a put and a get of one block at a store server, by row name."""
    return {
        f"store {verb}, {in_bytes(nbytes)}": StoreWork(
            verb=verb,
            nbytes=nbytes,
            count=COUNT,
            tier=stores.SERVER,
            layers=_LAYERS,
            set_blocks=1,
        )
        for nbytes in (64 * KIB, MIB)
        for verb in (stores.PUT, stores.GET)
    }


def sides_cpu_s(row: CaseResult) -> list[float]:
    """Return the CPU seconds per operation: initiating side, other side."""
    samples = row.samples.get(row.case.ours[0].name)
    if samples is None:
        return []
    return [cpu_s / len(samples.rounds[0]) for cpu_s in samples.sides_cpu_s]


def table_of(findings: Findings) -> list[RenderableType]:
    """Return a table of each operation's CPU time."""
    table = report.new_table("CPU of one operation", "us", "of the other side")
    for row in findings:
        table.add_row(row.case.name, *(f"{1e6 * s:.0f}" for s in sides_cpu_s(row)))
    return [Text(), table]


def ops(*, transport: str = "tcp", rounds: Rounds = 5, common: Common = COMMON) -> int:
    """Measure single operations: the time, and each side's CPU.

    The operations are transfers; one layer of many; messages, put and get; blocks from
    a window (with local: from ordinary memory and from arenas); and a block's put and
    get at a store server.

    Args:
        transport: The transport of kvwire; for a store, the one that its server offers.
        rounds: The number of rounds; more rounds give firmer medians.
        common: Options of every benchmark.
    """
    report.require_able([transport])
    ours = _kvwire(transport, common)
    store = Contender(
        ours.name,
        stores.store,
        environment={"KVWIRE_REQUIRE": transport},
        options={"tier": stores.SERVER, "loop": common.loop},
    )
    cases = [
        Case(
            name=name,
            work=work,
            unit=MICROSECONDS,
            ours=[store if isinstance(work, StoreWork) else ours],
            beside=[_streams(common)] if work.verb == of.ROUND_TRIP else [],
        )
        for name, work in {**operations(), **store_operations()}.items()
    ]
    if transport == "local":
        mapped = Contender(
            f"{ours.name} {of.ARENA}",
            of.operations,
            options={**ours.options, "memory": of.ARENA},
        )
        cases += [
            replace(case, name=f"{case.name}, {of.ARENA}", ours=[mapped])
            for case in cases
            if is_window_get(case.work)
        ]
    benchmark = Benchmark(
        name="ops",
        cases=cases,
        notes=["CPU: of the initiating side, and of the other side."],
        below=table_of,
        more=lambda found: {
            "cpu_s": {row.case.name: sides_cpu_s(row) for row in found}
        },
    )
    return common.run(benchmark, transport=transport, rounds=rounds)


def messages(
    *,
    transport: str = "tcp",
    peer: str = "",
    round_mib: Mebibytes = 256,
    rounds: Rounds = 10,
    common: Common = COMMON,
) -> int:
    """Measure round trips of 64 bytes; send, put and get of 1 MiB and 16 MiB.

    They are compared with a ping-pong over bare streams on the same loop, and over
    blocking sockets.

    Args:
        transport: The transport of kvwire.
        peer: Measure between this host and the host at this address, which must run
            `kvwire bench serve`. Then only kvwire takes part.
        round_mib: MiB that each contender moves per round, for rates.
        rounds: The number of rounds; more rounds give firmer medians.
        common: Options of every benchmark.
    """
    report.require_able([transport])
    options = {"transport": transport, "loop": common.loop, "by_link": 1}
    ours = [contender("kvwire", peer, **options)]
    bare = Contender("bare sockets", sockets)
    group = peer and f"to {peer}"
    ping = Case(
        name=f"{PING.nbytes} B {PING.verb}",
        work=PING,
        unit=MICROSECONDS,
        ours=ours,
        beside=[] if peer else [_streams(common)],
        tail=True,
        group=group,
    )
    rates = [
        Case(
            name=f"{in_bytes(nbytes)} {verb}",
            work=OpsWork(
                verb=verb,
                nbytes=nbytes,
                count=max(IN_FLIGHT, round_mib * MIB // nbytes),
                in_flight=IN_FLIGHT,
            ),
            unit=GIGABYTES_PER_SECOND,
            ours=ours,
            beside=[] if peer else [bare],
            group=group,
        )
        for nbytes in SIZES
        for verb in (of.SEND, of.PUT, of.GET)
    ]
    benchmark = Benchmark(
        name="messages",
        cases=[ping, *rates],
        notes=[f"{IN_FLIGHT} operations in flight. Only kvwire verifies the bytes."],
    )
    settings = {"transport": transport, "rounds": rounds, "round_mib": round_mib}
    return common.run(benchmark, peer=peer, **settings)


def setup(
    *, transport: str = "tcp", rounds: Rounds = 5, common: Common = COMMON
) -> int:
    """Measure a connection's handshake, and its first and second transfer.

    Args:
        transport: Transports that join two processes, separated by commas.
        rounds: The number of rounds, of 20 connections each.
        common: Options of every benchmark.
    """
    transports = report.require_able(transport.split(","))
    work = OpsWork(
        verb=of.SETUP, nbytes=TRANSFER_BYTES, count=CONNECTIONS, layers=_LAYERS
    )
    beside = _streams(common)
    benchmark = Benchmark(
        name="setup",
        cases=[
            Case(
                name=name,
                work=work,
                unit=MICROSECONDS,
                ours=[_kvwire(name, common)],
                beside=[beside],
                tail=True,
            )
            for name in transports
        ],
        notes=[
            f"A transfer is a pull of one block, {in_bytes(TRANSFER_BYTES)}.",
            "The streams connect and send the same number of bytes, and nothing else.",
        ],
        split=by_column,
    )
    return common.run(benchmark, transport=transports, rounds=rounds)


def by_column(found: CaseResult) -> Findings:
    """Split a connection's timings into one row each."""

    def row(at: int, name: str) -> CaseResult:
        whole = f"{found.case.name} {name}"
        return found.part(whole, lambda seconds: seconds[at :: len(COLUMNS)])

    return [row(at, name) for at, name in enumerate(COLUMNS)]


def _kvwire(transport: str, common: Common) -> Contender:
    options = {"transport": transport, "loop": common.loop}
    return Contender(f"kvwire {transport}", of.operations, options=options)


def _streams(common: Common) -> Contender:
    options = {"loop": common.loop}
    return Contender(f"{common.loop} streams", streams, options=options)
