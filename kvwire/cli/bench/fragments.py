"""``kvwire bench fragments``: scattered blocks of a cache, from small to large.

All contenders move the same bytes, in the same fragments, scattered over both sides'
memory in the same places (see :mod:`~kvwire.cli.bench.operations`), and the bytes are
compared once before anything is timed.

Rows are grouped by wire: contenders that go through the TCP stack, and those that
require both processes to be on one host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Final, Literal

import kvwire
from kvwire.backend import registry
from kvwire.cli.bench.bare import memcpy
from kvwire.cli.bench.operations import ARENA, GET, PULL, PUSH, OpsWork, operations
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.peer import contender
from kvwire.cli.bench.report import (
    COMMON,
    Common,
    Mebibytes,
    Rounds,
    between_processes,
    require_known,
    why_unable,
    within,
)
from kvwire.cli.bench.turns import GIGABYTES_PER_SECOND, Benchmark, Case, Missing
from kvwire.limits import KIB, MIB
from kvwire.types import MemoryKind, in_bytes

TCP: Final = "TCP"
SAME_HOST: Final = "same host"
VERBS: Final = (PUSH, PULL, GET)
MEMCPY: Final = "memcpy"
SIZES_KIB: Final = (4, 16, 64, 256, 1024, 16_384)
# Blocks across layers are interesting only where other layouts have small fragments.
CROSS_LAYER_KIB_MAX: Final = 64
# The transports that UCX may use.
UCX: Final = {"tcp": {"UCX_TLS": "tcp"}, "shm": {"UCX_TLS": "self,sm,tcp"}}
LAYERS_MAX: Final = 32
# A variant of a transport: its wire, its name's suffix, environment and options.
_Way = tuple[str, str, Mapping[str, str], Mapping[str, object]]
_OTHER: Final[list[_Way]] = [(SAME_HOST, "", {}, {})]
_WAYS: Final[Mapping[str, list[_Way]]] = {
    "tcp": [(TCP, "", {}, {})],
    "local": [(SAME_HOST, "", {}, {}), (SAME_HOST, f" {ARENA}", {}, {"memory": ARENA})],
    "nixl": [(TCP, " tcp", UCX["tcp"], {}), (SAME_HOST, " shm", UCX["shm"], {})],
    "ucx": [(TCP, " tcp", UCX["tcp"], {}), (SAME_HOST, " shm", UCX["shm"], {})],
}

Kibibytes = Annotated[tuple[int, ...], within(4, 16_384, consume_multiple=True)]
# A contender and the wire that it uses.
Member = tuple[str, Contender]


def work_of(
    verb: str, layer_bytes: int, *, cross_layer: bool, round_bytes: int
) -> OpsWork:
    """Return the work of one transfer of about ``round_bytes``."""
    fragments = max(2, round_bytes // layer_bytes)
    layers = min(LAYERS_MAX, fragments // 2)
    blocks = fragments // layers
    return OpsWork(
        verb=verb,
        nbytes=layer_bytes * layers * blocks,
        count=1,
        layers=layers,
        blocks=blocks,
        cross_layer=cross_layer,
    )


def why_not(transport: str) -> str:
    """Return why an installed backend cannot take part here; "" if it can."""
    if why := why_unable(transport):
        return why
    can = registry.load(transport).capabilities
    if MemoryKind.HOST not in can.memory_kinds:
        return "it moves no host memory, which this benchmark measures"
    if not can.lanes:
        return "it has no lanes, and this benchmark joins two processes over tcp"
    return ""


def contenders(
    transport: str, options: Mapping[str, object], peer: str = ""
) -> Iterator[Member]:
    """Yield a transport's variants, each with its wire."""
    name = f"kvwire {transport}"
    options = {"transport": transport, **options}
    if peer:
        # Each side's environment chooses its UCX transports.
        yield f"to {peer}", contender(name, peer, **options)
        return
    for wire, more, environment, given in _WAYS.get(transport, _OTHER):
        way = {**options, **given}
        yield (
            wire,
            Contender(name + more, operations, options=way, environment=environment),
        )


def fragments(
    transports: list[str], works: Sequence[OpsWork], loop: str, peer: str = ""
) -> Benchmark:
    """Make the benchmark, with the variants of ``transports`` that can run here."""
    reasons = {transport: why_not(transport) for transport in require_known(transports)}
    team = [
        one
        for transport in transports
        if not reasons[transport]
        for one in contenders(transport, {"loop": loop}, peer)
    ]
    benchmark = Benchmark(
        name="fragments",
        cases=[
            Case(
                name=f"{in_bytes(work.layer_bytes)} {work.verb}, {work.layout}",
                work=work,
                unit=GIGABYTES_PER_SECOND,
                ours=ours,
                group=wire,
            )
            for work in works
            for wire in (TCP, SAME_HOST, f"to {peer}")
            if (ours := [one for its, one in team if its == wire])
        ],
        missing=[
            Missing(f"kvwire {name}", reason, "cannot run here")
            for name, reason in reasons.items()
            if reason
        ],
        notes=[]
        if peer
        else [
            "CPU seconds are of both sides together. Only kvwire verifies the bytes.",
            "memcpy is one copy of contiguous bytes.",
        ],
    )
    copy = Contender(MEMCPY, memcpy, alone=True)
    return joined(benchmark, [], streams=[(SAME_HOST, copy)])


def joined(
    benchmark: Benchmark, team: Sequence[Member], streams: Sequence[Member] = ()
) -> Benchmark:
    """Add other contenders to a benchmark, each to the rows with its wire.

    Contenders in ``streams`` move contiguous bytes, which have no layout, so they are
    measured once.
    """

    def beside(case: Case) -> list[Contender]:
        able = [*team, *([] if case.work.cross_layer else streams)]
        return [one for wire, one in able if wire == case.group]

    cases = [
        replace(case, beside=[*case.beside, *beside(case)]) for case in benchmark.cases
    ]
    return replace(benchmark, cases=cases)


def command(
    *,
    transport: str = "all",
    peer: str = "",
    sizes_kib: Kibibytes = SIZES_KIB,
    verb: Literal["push", "pull", "get", "all"] = "all",
    layout: Literal["per-layer", "cross-layer", "both"] = "both",
    round_mib: Mebibytes = 64,
    rounds: Rounds = 5,
    common: Common = COMMON,
) -> int:
    """Measure how scattered blocks of a cache move, from 4 KiB to 16 MiB.

    Args:
        transport: Transports, separated by commas, or all that are installed. If one
            cannot run here, the output says why. local runs twice: with caches in
            ordinary memory and in arenas.
        peer: Measure between this host and the host at this address, which must run
            `kvwire bench serve`. `all` then means the transports that can join two
            hosts.
        sizes_kib: Sizes of one layer of one block, such as --sizes-kib 4 1024.
        verb: How blocks move: pushed, pulled, or got from a window.
        layout: One tensor per layer, or blocks across layers; the latter for layers of
            up to 64 KiB.
        round_mib: MiB that each contender moves in a round.
        rounds: The number of rounds; more rounds give firmer medians.
        common: Options of every benchmark.
    """
    transports = transport.split(",")
    if transport == "all":
        transports = [
            name
            for name in between_processes()
            # A transport that cannot run here is listed with the reason.
            if not peer
            or why_not(name)
            or not registry.load(name).capabilities.same_host
        ]
    layouts = {"per-layer": (False,), "cross-layer": (True,), "both": (False, True)}
    works = [
        work_of(one, kib * KIB, cross_layer=cross, round_bytes=round_mib * MIB)
        for kib in sorted(set(sizes_kib))
        for cross in layouts[layout]
        for one in (VERBS if verb == "all" else (verb,))
        if not cross or kib <= CROSS_LAYER_KIB_MAX
    ]
    if not works:
        raise kvwire.UsageError("--layout cross-layer takes sizes of up to 64 KiB")
    benchmark = fragments(transports, works, common.loop, peer)
    settings = {"sizes_kib": list(sizes_kib), "rounds": rounds, "round_mib": round_mib}
    failed = common.run(benchmark, transport=transports, peer=peer, **settings)
    return failed or int(transport != "all" and bool(benchmark.missing))
