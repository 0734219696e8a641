"""``kvwire bench store``: blocks into the tiers of a store and out of them again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvwire import UsageError
from kvwire.cli.bench.case import (
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    Benchmark,
    Case,
    Contender,
    Missing,
    Others,
)
from kvwire.cli.bench.filesystem import filesystem
from kvwire.cli.bench.fragments import require_known, size_name
from kvwire.cli.bench.sides.page_cache import can_drop
from kvwire.cli.bench.store_contender import ServedContender, StoreContender
from kvwire.cli.bench.store_work import (
    COLD_GET,
    DISK,
    FIRST_PUT,
    FLUSHED_PUT,
    GET,
    MATCH,
    MEMORY,
    OBJECT,
    ONE,
    PUT,
    SERVER,
    SETS,
    SHAPES,
    TIERS,
    Shape,
    StoreWork,
    work_of,
)
from kvwire.extras import install_command

# In their order; a match is of blocks of a size of its own.
_VERBS: Final = {
    MEMORY: (PUT, FIRST_PUT, GET, ONE),
    DISK: (PUT, FLUSHED_PUT, GET, COLD_GET, ONE),
    SERVER: (PUT, GET, ONE),
    OBJECT: (PUT, GET, ONE),
}
_TIMES: Final = (ONE, MATCH)
# A disk must have room for a tier, for the file beside it, and for a rest of its own.
_ROOM: Final = 2 * SETS + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreChoice:
    """What the user wants to see.

    Attributes:
        tiers: Of :data:`~kvwire.cli.bench.store_work.TIERS`.
        transports: To a server, of kvwire.
        shapes: Names of :data:`~kvwire.cli.bench.store_work.SHAPES`.
        directory: Of the disk and object tiers and their peers.
        round_bytes: Bytes of a set.
        loop: The event loop of kvwire.
    """

    tiers: Sequence[str]
    transports: Sequence[str]
    shapes: Sequence[str]
    directory: Path
    round_bytes: int
    loop: str

    @property
    def works(self) -> list[StoreWork]:
        """A put of each shape, which has the sizes of all others."""
        shapes = [SHAPES[name] for name in self.shapes]
        return [work_of(DISK, PUT, shape, self.round_bytes) for shape in shapes]


def store(choice: StoreChoice, others: Others | None = None) -> Benchmark:
    """The benchmark.

    Args:
        choice: What the user wants to see.
        others: Those who stand beside kvwire.

    Raises:
        UsageError: There is no such tier, transport or directory, or no room in it.
    """
    _require_known(choice)
    others = others or Others()
    missing = list(others.missing)
    cases: list[Case] = []
    for tier in choice.tiers:
        if tier == SERVER:
            for transport in choice.transports:
                cases += _server(choice, transport, others)
        elif tier == OBJECT and find_spec("obstore") is None:
            missing.append(_no_obstore())
        else:
            cases += _local(choice, tier, others)
    if not cases:
        raise UsageError(f"--tiers {OBJECT} needs obstore: {_no_obstore().remedy}")
    return Benchmark(
        name="store",
        cases=cases,
        missing=missing,
        notes=[*_notes(choice), *others.notes],
    )


def _no_obstore() -> Missing:
    return Missing("the object tier", install_command("store"))


def _local(choice: StoreChoice, tier: str, others: Others) -> list[Case]:
    place = {DISK: choice.directory / "kv", OBJECT: choice.directory / "objects" / "kv"}
    options = _options(choice, tier, place.get(tier))
    ours = StoreContender(f"kvwire {tier}", "store", options)
    return _cases(choice, tier, tier, ours, others)


def _server(choice: StoreChoice, transport: str, others: Others) -> list[Case]:
    ours = ServedContender(
        f"kvwire server {transport}", _options(choice, SERVER), transport
    )
    return _cases(choice, SERVER, f"{SERVER} over {transport}", ours, others)


def _cases(
    choice: StoreChoice,
    tier: str,
    name: str,
    ours: Contender,
    others: Others,
) -> list[Case]:
    """The rows of one tier, shape by shape, and the match at the end."""
    shapes = [SHAPES[shape] for shape in choice.shapes]
    peers = others.movers.get(name, ())
    found = [
        _case(choice, name, verb, shape, ours, _able(verb, peers))
        for shape in shapes
        for verb in _VERBS[tier]
        if verb != COLD_GET or can_drop(choice.directory)
    ]
    if tier != OBJECT:
        found.append(
            _case(choice, name, MATCH, shapes[0], ours, others.matchers.get(name, ()))
        )
    return found


def _able(verb: str, peers: Sequence[Contender]) -> list[Contender]:
    """A copy has nothing to flush, and never finds anything cold."""
    on_disk = verb in (FLUSHED_PUT, COLD_GET)
    return [peer for peer in peers if not (on_disk and peer.name == "memcpy")]


def _case(
    choice: StoreChoice,
    tier: str,
    verb: str,
    shape: Shape,
    ours: Contender,
    beside: Sequence[Contender],
) -> Case:
    work = work_of(tier, verb, shape, choice.round_bytes)
    return Case(
        name=f"{tier}, {size_name(work.nbytes)}, {verb}",
        work=work,
        unit=MICROSECONDS if verb in _TIMES else GIGABYTES_PER_SECOND,
        ours=ours,
        beside=beside,
        target=None,
        tail=verb in _TIMES,
    )


def _options(choice: StoreChoice, tier: str, place: Path | None = None) -> list[str]:
    where = [] if place is None else [f"place={place}"]
    return [f"tier={tier}", f"loop={choice.loop}", *where]


def _require_known(choice: StoreChoice) -> None:
    for tier in choice.tiers:
        if tier not in TIERS:
            raise UsageError(f"--tiers {tier}: there are {', '.join(TIERS)}")
    if SERVER in choice.tiers:
        require_known(choice.transports, processes=True)
    needed = _ROOM * sum(work.set_bytes for work in choice.works)
    free = shutil.disk_usage(choice.directory).free
    if DISK in choice.tiers and free < needed:
        raise UsageError(
            f"--directory {choice.directory}: {free} bytes are free, and {needed} "
            f"needed; name another one, or give a smaller --round-mib"
        )


def _notes(choice: StoreChoice) -> list[str]:
    notes = [
        f"A put or get: {size_name(work.set_bytes)}, {work.set_blocks} blocks of "
        f"{work.layers} fragments of {size_name(work.layer_bytes)}, scattered."
        for work in choice.works
    ]
    notes.append("Of every get each byte is compared with what was put.")
    if DISK in choice.tiers:
        notes += [
            f"disk: {filesystem(choice.directory)}. A put ends in the page cache, or",
            "flushed with an fsync; a get reads the page cache, or cold the device.",
        ]
        if not can_drop(choice.directory):
            notes.append("No cold get: here files stay in memory, or nobody can tell.")
    if SERVER in choice.tiers:
        notes.append("server: another process of this host, with blocks in memory.")
    return notes
