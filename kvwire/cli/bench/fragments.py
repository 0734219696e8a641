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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    registered,
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
from kvwire.cli.bench.turns import (
    GIGABYTES_PER_SECOND,
    Benchmark,
    Case,
    Missing,
)
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
    """``count`` fragments of ``nbytes`` bytes; ``verb`` is ``"push"`` or ``"pull"``.

    Attributes:
        layers: Layers of the cache.
        cross_layer: A block has all layers side by side, so that it is one fragment;
            otherwise each layer of a block is one.
    """

    layers: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentsChoice:
    """What the user wants to see; layouts are true for blocks across layers."""

    transports: Sequence[str]
    layer_bytes: Sequence[int]
    verbs: Sequence[str] = VERBS
    layouts: Sequence[bool] = (False, True)
    round_bytes: int
    loop: str

    @property
    def works(self) -> list[FragmentWork]:
        """Everything that is moved."""
        return [
            work_of(verb, nbytes, cross_layer=cross, round_bytes=self.round_bytes)
            for nbytes in sorted(set(self.layer_bytes))
            for cross in self.layouts
            for verb in self.verbs
            if not cross or nbytes <= CROSS_LAYER_BYTES_MAX
        ]


@dataclass(slots=True)
class Team:
    """Who takes part, by wire, and who could not."""

    by_wire: dict[str, list[Contender]] = field(
        default_factory=lambda: {wire: [] for wire in WIRES}
    )
    missing: list[Missing] = field(default_factory=list)


Join = Callable[[Team, int], None]


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


def fragments(choice: FragmentsChoice, join: Join | None = None) -> Benchmark:
    """Make the benchmark.

    Args:
        choice: What the user wants to see.
        join: Adds those who stand beside kvwire to the team; the number is that of
            bytes of the largest pool.

    Raises:
        UsageError: A transport that nobody knows.
    """
    works = choice.works
    pool_bytes = max(work.pool_bytes for work in works)
    team = Team()
    for transport in choice.transports:
        _add_transport(team, transport, choice.loop, pool_bytes)
    if join is not None:
        join(team, pool_bytes)
    team.by_wire[SAME_HOST].append(
        Contender(
            MEMCPY,
            MemcpySide,
            alone=True,
            streams=True,
            note="memcpy is one copy of bytes side by side.",
            pool_bytes=pool_bytes,
        )
    )
    cases = [
        Case(
            name=f"{size_name(work.layer_bytes)} {work.verb}, {work.layout}",
            work=work,
            unit=GIGABYTES_PER_SECOND,
            contenders=contenders,
            group=wire,
            essential=False,
        )
        for work in works
        for wire in WIRES
        # Bytes side by side have no layout: they are measured once.
        if (
            contenders := [
                one
                for one in team.by_wire[wire]
                if not (work.cross_layer and one.streams)
            ]
        )
    ]
    notes = [one.note for wire in WIRES for one in team.by_wire[wire] if one.note]
    return Benchmark(
        name="fragments",
        cases=cases,
        missing=team.missing,
        notes=[
            "CPU seconds are of both sides. Of these only kvwire checks what it moves.",
            *dict.fromkeys(notes),
        ],
    )


def _add_transport(team: Team, transport: str, loop: str, pool_bytes: int) -> None:
    options: dict[str, Any] = {"transport": transport, "loop": loop}
    options |= {"pool_bytes": pool_bytes, "ours": True}
    name = f"kvwire {transport}"
    require_known([transport], processes=False)
    reason = why_not(transport)
    if reason:
        team.missing.append(Missing(name, reason, "cannot run here"))
        return
    tcp, same_host = team.by_wire[TCP], team.by_wire[SAME_HOST]
    if transport == "inproc":
        same_host.append(Contender(name, InprocSide, alone=True, **options))
    elif transport in ("ucx", "nixl"):
        for wire, found in (("tcp", tcp), ("shm", same_host)):
            one = Contender(
                f"{name} {wire}", FragmentsSide, environment=UCX[wire], **options
            )
            found.append(one)
        if transport == "nixl":
            return
        environment = {**UCX["shm"], **ONE_SIDED}
        one_sided = Contender(
            f"{name} one-sided", FragmentsSide, environment=environment, **options
        )
        same_host.append(one_sided)
    else:
        found = tcp if transport == "tcp" else same_host
        found.append(Contender(name, FragmentsSide, **options))
    if transport == "local":
        same_host.append(
            Contender(f"{name} {ARENA}", FragmentsSide, memory=ARENA, **options)
        )


# --- the command ----------------------------------------------------------------------


def command(
    *,
    transport: str = "all",
    sizes_kib: Kibibytes = SIZES_KIB,
    verb: Literal["push", "pull", "both"] = "both",
    layout: Literal["per-layer", "cross-layer", "both"] = "both",
    round_mib: Mebibytes = 64,
    join: Annotated[Join | None, Parameter(parse=False)] = None,
    shown: Annotated[Mapping[str, Any] | None, Parameter(parse=False)] = None,
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
        join: Adds who stands beside kvwire; no option of the command.
        shown: More of it, for ``report.run``; no option of the command.
        rounds: How often everybody does their work; more rounds, firmer medians.
        common: Options of every benchmark.

    Returns:
        1 if a transport of kvwire that was asked for by name failed.
    """
    layouts = {"per-layer": (False,), "cross-layer": (True,), "both": (False, True)}
    choice = FragmentsChoice(
        transports=registered() if transport == "all" else transport.split(","),
        layer_bytes=[kib * KIB for kib in sizes_kib],
        verbs=VERBS if verb == "both" else (verb,),
        layouts=layouts[layout],
        round_bytes=round_mib * MIB,
        loop=common.loop,
    )
    benchmark = fragments(choice, join)
    settings: dict[str, Any] = {
        "transport": list(choice.transports),
        "sizes_kib": list(sizes_kib),
        "rounds": rounds,
        "round_mib": round_mib,
    }
    found = common.run(benchmark, settings, **(shown or {}))
    failed = any(
        one.ours and one.name in f.failures for f in found for one in f.case.contenders
    )
    return int(transport != "all" and (failed or bool(benchmark.missing)))
