"""``kvwire bench fragments``: a cache in blocks, from small to large, by everybody.

Everybody moves the same bytes, in the same fragments, scattered over both sides' memory
in the same places, and the bytes are compared once before anything is timed. A side's
memory is a pool with twice the blocks that travel. Which of them travel, and in what
order, is drawn at random for each side, and no two of them lie side by side, so that
nobody can merge two fragments into one.

Two wires are told apart: whoever goes through the TCP stack, and whoever uses that both
processes are on one host.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt
from cyclopts import Parameter
from cyclopts.validators import Number

import kvwire
from kvwire.backend import registry
from kvwire.cli.bench.pair import Contender, Work
from kvwire.cli.bench.report import (
    COMMON,
    Common,
    Mebibytes,
    Rounds,
    require_known,
    size_name,
)
from kvwire.cli.bench.side import (
    Bytes,
    ConnectedSide,
    End,
    JoinedSide,
    Side,
    digest,
    fill,
    mark_all,
    over,
    paged,
    require_same,
)
from kvwire.cli.bench.turns import GIGABYTES_PER_SECOND, Benchmark, Case, Missing
from kvwire.limits import KIB, MIB
from kvwire.memory.arena import Arena
from kvwire.types import MemoryKind

TCP: Final = "TCP"
SAME_HOST: Final = "same host"
WIRES: Final = (TCP, SAME_HOST)
VERBS: Final = ("push", "pull")
MEMCPY: Final = "memcpy"
# Pools lie in memory that the other side can map.
ARENA: Final = "arena"
SIZES_KIB: Final = (4, 16, 64, 256, 1024, 16_384)
# Blocks across layers differ from others where the others' fragments are small.
CROSS_LAYER_BYTES_MAX: Final = 64 * 1024
# What UCX may use.
UCX: Final = {"tcp": {"UCX_TLS": "tcp"}, "shm": {"UCX_TLS": "self,sm,tcp"}}
# The receiver reads large fragments where they lie; over TCP they are messages anyway.
ONE_SIDED: Final = {"KVWIRE_BACKENDS": "ucx.one_sided=yes"}
LAYERS_MAX: Final = 32
# The left and the right side have their blocks in different places.
LEFT: Final = 1
RIGHT: Final = 2
# Every other block of the pool, so that none that travel are neighbours.
_SPREAD: Final = 2
_GO: Final = 1

Kibibytes = Annotated[
    tuple[int, ...],
    Parameter(
        validator=Number(gte=4, lte=16_384), consume_multiple=True, negative_iterable=()
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentWork(Work):
    """``count`` fragments of ``nbytes`` bytes; ``verb`` is ``"push"`` or ``"pull"``."""

    layers: int
    # A block has all layers side by side, so that it is one fragment; otherwise each
    # layer of a block is one.
    cross_layer: bool = False

    @property
    def blocks(self) -> int:
        """Blocks that travel."""
        return self.count if self.cross_layer else self.count // self.layers

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.nbytes // self.layers if self.cross_layer else self.nbytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return _SPREAD * self.blocks * self.layers * self.layer_bytes

    @property
    def layout(self) -> str:
        """As it is shown."""
        return "cross-layer" if self.cross_layer else "per-layer"


def work_of(
    verb: str, layer_bytes: int, *, cross_layer: bool, round_bytes: int
) -> FragmentWork:
    """Make a work of about ``round_bytes``, of blocks with ``layer_bytes`` a layer."""
    fragments = max(2, round_bytes // layer_bytes)
    layers = min(LAYERS_MAX, fragments // 2)
    blocks = fragments // layers
    return FragmentWork(
        verb=verb,
        nbytes=layer_bytes * (layers if cross_layer else 1),
        count=blocks * (1 if cross_layer else layers),
        layers=layers,
        cross_layer=cross_layer,
    )


class Pool:
    """The memory of one side as the cache of a work."""

    def __init__(self, memory: Bytes, work: FragmentWork, side: int) -> None:
        self.memory: Bytes = memory[: work.pool_bytes]
        pool_blocks = _SPREAD * work.blocks
        self.cache: kvwire.PagedCache = paged(
            self.memory, work.layers, pool_blocks, cross_layer=work.cross_layer
        )
        blocks = np.random.default_rng(side).permutation(work.blocks) * _SPREAD
        # Those that travel, and where their fragments lie, layer after layer.
        self.blocks: list[int] = blocks.tolist()
        first = np.arange(1 if work.cross_layer else work.layers) * pool_blocks
        self.rows: npt.NDArray[np.int64] = (first[:, None] + blocks).ravel()
        self._shape = (-1, work.nbytes)

    def digest(self) -> str:
        """Of the bytes that travel, in their order."""
        return digest(self.fragments())

    def fragments(self) -> Bytes:
        """Copy the fragments that travel, layer after layer."""
        return self.memory.reshape(self._shape)[self.rows]


class FragmentsSide(ConnectedSide[FragmentWork]):
    """The left side pulls or pushes, the right one publishes or expects."""

    work_type: ClassVar[type[Work]] = FragmentWork
    pool: Pool

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        nbytes = int(options["pool_bytes"])
        self._arena = Arena(nbytes) if options.get("memory") == ARENA else None
        self.memory: Bytes = (
            self._arena.buffer(nbytes) if self._arena else np.empty(nbytes, np.uint8)
        )
        # Written to, so that no page is missing when it is timed.
        self.memory[:] = 1
        self._work: FragmentWork | None = None

    async def prepare(self, work: FragmentWork) -> None:
        self.have(work, RIGHT)

    async def use(self, work: FragmentWork, given: None) -> None:
        self.have(work, LEFT)

    async def fill(self, work: FragmentWork) -> None:
        await fill(self.pool.memory)

    async def digest(self, work: FragmentWork) -> str:
        return self.pool.digest()

    async def drive(self, work: FragmentWork) -> dict[str, Any]:
        elapsed_s = await self.ask(work, self.pool.blocks)
        return {"values": [work.moved_bytes / elapsed_s]}

    async def serve(self, work: FragmentWork) -> dict[str, Any]:
        await self.offer(work, self.pool.blocks)
        return {}

    async def close(self) -> None:
        await super().close()
        if self._arena is not None:
            # Transfers may still have arrays in it, which keep it mapped.
            with contextlib.suppress(kvwire.UsageError):
                self._arena.close()

    async def ask(self, work: FragmentWork, blocks: list[int]) -> float:
        """Left: one transfer; seconds from the first call to its outcome."""
        number, connection, cache = self.next_id(), self.connection, self.pool.cache
        await connection.recv(_GO)
        began = time.perf_counter()
        end: End
        if work.verb == "pull":
            end = connection.pull(number, cache, blocks)
        else:
            end = mark_all(connection.push(number, cache, blocks))
        await end
        elapsed_s = time.perf_counter() - began
        await over(end)
        return elapsed_s

    async def offer(self, work: FragmentWork, blocks: list[int]) -> None:
        """Right: the other end of it, ready before the left one begins."""
        number, cache = self.next_id(), self.pool.cache
        end: End
        if work.verb == "pull":
            end = mark_all(self.communicator.publish(number, cache, blocks))
        else:
            end = self.communicator.expect(number, cache, blocks)
        await self.connection.send(_GO, b"")
        await over(end)

    def have(self, work: FragmentWork, side: int) -> None:
        """Have the memory of a work as a cache."""
        if self._work != work:
            self.pool = Pool(self.memory, work, side)
            self._work = work


class InprocSide(JoinedSide[FragmentWork]):
    """Two communicators of one loop."""

    work_type: ClassVar[type[Work]] = FragmentWork

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(FragmentsSide(options), FragmentsSide(options))


class MemcpySide(Side[FragmentWork]):
    """One copy of as many bytes that lie side by side: what memory does at best."""

    work_type: ClassVar[type[Work]] = FragmentWork

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._source = np.ones(int(options["pool_bytes"]), np.uint8)
        self._sink = np.zeros_like(self._source)

    async def connect(self, address: Any) -> dict[str, Any]:
        return {"numpy": np.__version__}

    async def fill(self, work: FragmentWork) -> None:
        await fill(self._source)

    async def drive(self, work: FragmentWork) -> dict[str, Any]:
        part = slice(work.moved_bytes)
        began = time.perf_counter()
        np.copyto(self._sink[part], self._source[part])
        return {"values": [work.moved_bytes / (time.perf_counter() - began)]}

    async def digest(self, work: FragmentWork) -> str:
        part = slice(work.moved_bytes)
        require_same(digest(self._source[part]), digest(self._sink[part]))
        return ""


# --- who takes part -------------------------------------------------------------------


def why_not(transport: str) -> str:
    """Why a backend that is installed cannot take part here; "" if it can."""
    found = registry.availability(transport)
    if not found.available:
        return "; ".join(filter(None, (found.reason, found.remedy)))
    can = registry.load(transport).capabilities
    if MemoryKind.HOST not in can.memory_kinds:
        return "it moves no host memory, which this benchmark measures"
    if not can.lanes:
        return "it has no lanes, and this benchmark joins two processes over tcp"
    return ""


def contenders(
    transport: str, options: Mapping[str, object]
) -> Iterator[tuple[str, Contender]]:
    """Yield the ways of a transport, and the wire of each."""
    name, options = f"kvwire {transport}", {"transport": transport, **options}

    def side(
        more: str = "", environment: Mapping[str, str] | None = None, **given: str
    ) -> Contender:
        return Contender(
            name + more,
            InprocSide if transport == "inproc" else FragmentsSide,
            alone=transport == "inproc",
            ours=True,
            options={**options, **given},
            environment=environment or {},
        )

    if transport in ("ucx", "nixl"):
        yield TCP, side(" tcp", UCX["tcp"])
        yield SAME_HOST, side(" shm", UCX["shm"])
    else:
        yield TCP if transport == "tcp" else SAME_HOST, side()
    if transport == "ucx":
        yield SAME_HOST, side(" one-sided", {**UCX["shm"], **ONE_SIDED})
    if transport == "local":
        yield SAME_HOST, side(f" {ARENA}", memory=ARENA)


def fragments(
    transports: Sequence[str], works: Sequence[FragmentWork], loop: str
) -> Benchmark:
    """Make the benchmark, with those of the transports that can run here."""
    require_known(transports, processes=False)
    reasons = {transport: why_not(transport) for transport in transports}
    pool = {"pool_bytes": max(work.pool_bytes for work in works)}
    team = [
        one
        for transport in transports
        if not reasons[transport]
        for one in contenders(transport, {"loop": loop, **pool})
    ]
    note = "memcpy is one copy of bytes side by side."
    memcpy = Contender(
        MEMCPY, MemcpySide, alone=True, streams=True, note=note, options=pool
    )
    benchmark = Benchmark(
        name="fragments",
        cases=[
            Case(
                name=f"{size_name(work.layer_bytes)} {work.verb}, {work.layout}",
                work=work,
                unit=GIGABYTES_PER_SECOND,
                contenders=(),
                group=wire,
            )
            for work in works
            for wire in WIRES
        ],
        missing=[
            Missing(f"kvwire {name}", reason, "cannot run here")
            for name, reason in reasons.items()
            if reason
        ],
        notes=[
            "CPU seconds are of both sides. Of these only kvwire checks what it moves."
        ],
    )
    return joined(benchmark, [*team, (SAME_HOST, memcpy)])


def joined(benchmark: Benchmark, team: Sequence[tuple[str, Contender]]) -> Benchmark:
    """Have these take part too, each at its wire; a case that nobody does is left out.

    Bytes side by side have no layout: they are measured once.
    """
    cases = []
    for case in benchmark.cases:
        beside = [
            one
            for wire, one in team
            if wire == case.group and not (case.work.cross_layer and one.streams)
        ]
        cases.append(replace(case, contenders=[*case.contenders, *beside]))
    notes = dict.fromkeys([*benchmark.notes, *(one.note for _, one in team)])
    return replace(benchmark, cases=cases, notes=[*filter(None, notes)])


def command(
    *,
    transport: str = "all",
    sizes_kib: Kibibytes = SIZES_KIB,
    verb: Literal["push", "pull", "both"] = "both",
    layout: Literal["per-layer", "cross-layer", "both"] = "both",
    round_mib: Mebibytes = 64,
    rounds: Rounds = 5,
    common: Common = COMMON,
) -> int:
    """Blocks of a paged cache, scattered on both sides: push and pull, 4 KiB to 16 MiB.

    Args:
        transport: Of kvwire, separated by commas, or all that are installed. One that
            cannot run here is named with the reason; local runs twice, with caches in
            ordinary memory and in arenas, ucx as messages and one-sided.
        sizes_kib: Sizes of one layer of one block.
        verb: Which side asks.
        layout: A tensor for each layer, or blocks across layers; the latter up to 64
            KiB a layer.
        round_mib: MiB that each moves in a round.
        rounds: How often everybody does their work; more rounds, firmer medians.
        common: Options of every benchmark.
    """
    transports = registry.names() if transport == "all" else transport.split(",")
    layouts = {"per-layer": (False,), "cross-layer": (True,), "both": (False, True)}
    works = [
        work_of(one, kib * KIB, cross_layer=cross, round_bytes=round_mib * MIB)
        for kib in sorted(set(sizes_kib))
        for cross in layouts[layout]
        for one in (VERBS if verb == "both" else (verb,))
        if not cross or kib * KIB <= CROSS_LAYER_BYTES_MAX
    ]
    if not works:
        raise kvwire.UsageError("--layout cross-layer is for sizes of up to 64 KiB")
    benchmark = fragments(transports, works, common.loop)
    failed = common.run(
        benchmark,
        transport=list(transports),
        sizes_kib=list(sizes_kib),
        rounds=rounds,
        round_mib=round_mib,
    )
    return failed or int(transport != "all" and bool(benchmark.missing))
