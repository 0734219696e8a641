"""``kvwire bench fragments``: a cache in blocks, from small to large, by everybody.

Everybody moves the same bytes, in the same fragments, scattered over both sides' memory
in the same places, and the bytes are compared once before anything is timed. Peers that
have no such thing move what they can, and the notes say so.

Two wires are told apart: whoever goes through the TCP stack, and whoever uses that both
processes are on one host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Final

from kvwire import UsageError
from kvwire.backend import registry
from kvwire.cli.bench.case import (
    GIGABYTES_PER_SECOND,
    Benchmark,
    Case,
    Contender,
    Missing,
)
from kvwire.cli.bench.fragment_work import ARENA, FragmentWork, work_of
from kvwire.cli.bench.pair import FragmentPair
from kvwire.cli.bench.solo import SoloContender
from kvwire.types import MemoryKind

TCP: Final = "TCP"
SAME_HOST: Final = "same host"
WIRES: Final = (TCP, SAME_HOST)
VERBS: Final = ("push", "pull")
MEMCPY: Final = "memcpy"
NOTE: Final = (
    "CPU seconds are of both sides. Of these only kvwire checks what it moves."
)
# Blocks across layers differ from others where the others' fragments are small.
CROSS_LAYER_BYTES_MAX: Final = 64 * 1024
# What UCX may use.
UCX_TCP: Final = {"UCX_TLS": "tcp"}
UCX_SHM: Final = {"UCX_TLS": "self,sm,tcp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentsChoice:
    """What the user wants to see.

    Attributes:
        transports: Of kvwire.
        layer_bytes: Sizes of one layer of one block.
        verbs: Of :data:`VERBS`.
        layouts: False for a tensor for each layer, True for blocks across layers.
        round_bytes: What everybody moves in a round.
        loop: The event loop of kvwire.
    """

    transports: Sequence[str]
    layer_bytes: Sequence[int]
    verbs: Sequence[str] = VERBS
    layouts: Sequence[bool] = (False, True)
    round_bytes: int
    loop: str


@dataclass(slots=True)
class Team:
    """Who takes part, by wire.

    Attributes:
        by_wire: Contenders.
        missing: Who could not take part, and what would change that.
    """

    by_wire: dict[str, list[Contender]] = field(
        default_factory=lambda: {wire: [] for wire in WIRES}
    )
    missing: list[Missing] = field(default_factory=list)

    def add(self, wire: str, contender: Contender) -> None:
        """Let somebody take part."""
        self.by_wire[wire].append(contender)


def fragments(
    choice: FragmentsChoice, others: Callable[[Team, int], None] | None = None
) -> Benchmark:
    """The benchmark.

    Args:
        choice: What the user wants to see.
        others: Adds those who stand beside kvwire to the team; the number is that of
            bytes of the largest pool.

    Raises:
        UsageError: A transport that nobody knows.
    """
    works = _works(choice)
    pool_bytes = max(work.pool_bytes for work in works)
    team = Team()
    for transport in choice.transports:
        _add_transport(team, transport, choice.loop, pool_bytes)
    ours = [c.name for wire in WIRES for c in team.by_wire[wire]]
    if others is not None:
        others(team, pool_bytes)
    memcpy = SoloContender(MEMCPY, MEMCPY, [f"pool_bytes={pool_bytes}"])
    memcpy.streams, memcpy.note = True, "memcpy is one copy of bytes side by side."
    team.add(SAME_HOST, memcpy)
    cases = [
        Case(
            name=f"{size_name(work.layer_bytes)} {work.verb}, {work.layout}, {wire}",
            work=work,
            unit=GIGABYTES_PER_SECOND,
            ours=contenders[0],
            beside=contenders[1:],
            group=wire,
            essential=False,
        )
        for work in works
        for wire in WIRES
        if (contenders := [c for c in team.by_wire[wire] if _has_layout(work, c)])
    ]
    everybody = (c for wire in WIRES for c in team.by_wire[wire])
    notes = [NOTE, *dict.fromkeys(filter(None, (c.note for c in everybody)))]
    return Benchmark(
        name="fragments", cases=cases, missing=team.missing, notes=notes, ours=ours
    )


def registered() -> list[str]:
    """Names of the backends that are installed, whether they can run or not."""
    return sorted({entry.name for entry in entry_points(group="kvwire.backends")})


def require_known(transports: Sequence[str], *, processes: bool = False) -> None:
    """Refuse transports that nobody can measure.

    Args:
        transports: As the user named them.
        processes: They have to join two processes.

    Raises:
        UsageError: One is not installed, or joins loops of one process.
    """
    known = [name for name in registered() if not processes or name != "inproc"]
    for name in transports:
        if name == "inproc" and processes:
            raise UsageError(
                "--transport inproc joins two loops of one process, and this benchmark "
                f"runs two processes; there are {', '.join(known)}"
            )
        if name not in known:
            raise UsageError(
                f"--transport {name}: no such backend is installed; there are "
                f"{', '.join(known)}"
            )


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


def size_name(nbytes: int) -> str:
    """Such as ``64 KiB``."""
    kib = nbytes // 1024
    return f"{kib // 1024} MiB" if kib >= 1024 else f"{kib} KiB"


def _has_layout(work: FragmentWork, contender: Contender) -> bool:
    """Bytes side by side have none: they are measured once."""
    return not (work.cross_layer and contender.streams)


def _works(choice: FragmentsChoice) -> list[FragmentWork]:
    return [
        work_of(verb, nbytes, cross_layer=cross, round_bytes=choice.round_bytes)
        for nbytes in sorted(set(choice.layer_bytes))
        for cross in choice.layouts
        for verb in choice.verbs
        if not cross or nbytes <= CROSS_LAYER_BYTES_MAX
    ]


def _add_transport(team: Team, transport: str, loop: str, pool_bytes: int) -> None:
    options = [f"transport={transport}", f"loop={loop}", f"pool_bytes={pool_bytes}"]
    name = f"kvwire {transport}"
    require_known([transport])
    reason = why_not(transport)
    if reason:
        team.missing.append(Missing(name, reason, "cannot run here"))
        return
    if transport == "inproc":
        team.add(SAME_HOST, SoloContender(name, "inproc", options))
    elif transport == "ucx":
        for wire, setting, environment in (
            (TCP, "tcp", UCX_TCP),
            (SAME_HOST, "shm", UCX_SHM),
        ):
            pair = FragmentPair(f"{name} {setting}", "fragments", options, environment)
            team.add(wire, pair)
    else:
        wire = TCP if transport == "tcp" else SAME_HOST
        team.add(wire, FragmentPair(name, "fragments", options))
    if transport == "local":
        in_arenas = [*options, f"memory={ARENA}"]
        team.add(SAME_HOST, FragmentPair(f"{name} {ARENA}", "fragments", in_arenas))
