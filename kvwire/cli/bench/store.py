"""``kvwire bench store``: blocks into the tiers of a store and out of them again.

Each tier stands beside what is left of the same work without a store: a copy, a file, a
transfer, a socket, objects. Nobody of those has hashes, an index, eviction, blocks that
lie scattered or, but for the transfer, checksums; so the ratio is what that costs.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvwire import UsageError
from kvwire.cli.bench import redis
from kvwire.cli.bench.case import (
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    Benchmark,
    Case,
    Contender,
    Missing,
)
from kvwire.cli.bench.filesystem import filesystem
from kvwire.cli.bench.fragments import registered, size_name
from kvwire.cli.bench.peer import FragmentPair
from kvwire.cli.bench.sides.page_cache import can_drop
from kvwire.cli.bench.solo import SoloContender
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
class Choice:
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


def store(choice: Choice) -> Benchmark:
    """The benchmark.

    Raises:
        UsageError: There is no such tier, transport or directory, or no room in it.
    """
    _require_known(choice)
    missing: list[Missing] = []
    cases: list[Case] = []
    memcpy = SoloContender("memcpy", "store-memcpy")
    for tier in choice.tiers:
        if tier == MEMORY:
            cases += _memory(choice, memcpy)
        elif tier == DISK:
            cases += _disk(choice, memcpy)
        elif tier == SERVER:
            beside, absent = _servers()
            missing += absent
            for transport in choice.transports:
                cases += _server(choice, transport, beside)
        elif find_spec("obstore") is None:
            missing.append(_no_obstore())
        else:
            cases += _object(choice)
    if not cases:
        raise UsageError(f"--tiers {OBJECT} needs obstore: {_no_obstore().remedy}")
    return Benchmark(name="store", cases=cases, missing=missing, notes=_notes(choice))


def _no_obstore() -> Missing:
    return Missing("the object tier", install_command("store"))


def _memory(choice: Choice, memcpy: Contender) -> list[Case]:
    ours = StoreContender("kvwire memory", "store", _options(choice, MEMORY))
    table = SoloContender("dict", "store-dict")
    return _cases(choice, MEMORY, MEMORY, ours, [memcpy], [table])


def _disk(choice: Choice, memcpy: Contender) -> list[Case]:
    place = choice.directory
    ours = StoreContender("kvwire disk", "store", _options(choice, DISK, place / "kv"))
    file = SoloContender("file", "store-file", [f"place={place}"])
    return _cases(choice, DISK, DISK, ours, [memcpy, file], [])


def _servers() -> tuple[list[Contender], list[Missing]]:
    """Who stands beside a server over every transport, and who is not there."""
    sockets = FragmentPair("sockets", "store-sockets")
    absent = redis.missing()
    if absent is not None:
        return [sockets], [absent]
    return [sockets, redis.RedisContender()], []


def _server(choice: Choice, transport: str, beside: Sequence[Contender]) -> list[Case]:
    ours = ServedContender(
        f"kvwire server {transport}", _options(choice, SERVER), transport
    )
    pool_bytes = max(work.transfer.pool_bytes for work in choice.works)
    options = [f"transport={transport}", f"pool_bytes={pool_bytes}"]
    options.append(f"loop={choice.loop}")
    transfer = FragmentPair(f"transfer {transport}", "store-transfer", options)
    name = f"{SERVER} over {transport}"
    return _cases(choice, SERVER, name, ours, [transfer, *beside], beside)


def _object(choice: Choice) -> list[Case]:
    place = choice.directory / "objects"
    ours = StoreContender(
        "kvwire object", "store", _options(choice, OBJECT, place / "kv")
    )
    bare = SoloContender("obstore", "store-obstore", [f"place={place / 'bare'}"])
    return _cases(choice, OBJECT, OBJECT, ours, [bare], [])


def _cases(
    choice: Choice,
    tier: str,
    name: str,
    ours: Contender,
    peers: Sequence[Contender],
    matchers: Sequence[Contender],
) -> list[Case]:
    """The rows of one tier, shape by shape, and the match at the end."""
    shapes = [SHAPES[shape] for shape in choice.shapes]
    found = [
        _case(choice, name, verb, shape, ours, _able(verb, peers))
        for shape in shapes
        for verb in _VERBS[tier]
        if verb != COLD_GET or can_drop(choice.directory)
    ]
    if tier != OBJECT:
        found.append(_case(choice, name, MATCH, shapes[0], ours, matchers))
    return found


def _able(verb: str, peers: Sequence[Contender]) -> list[Contender]:
    """A copy has nothing to flush, and never finds anything cold."""
    on_disk = verb in (FLUSHED_PUT, COLD_GET)
    return [peer for peer in peers if not (on_disk and peer.name == "memcpy")]


def _case(
    choice: Choice,
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


def _options(choice: Choice, tier: str, place: Path | None = None) -> list[str]:
    where = [] if place is None else [f"place={place}"]
    return [f"tier={tier}", f"loop={choice.loop}", *where]


def _require_known(choice: Choice) -> None:
    for tier in choice.tiers:
        if tier not in TIERS:
            raise UsageError(f"--tiers {tier}: there are {', '.join(TIERS)}")
    for transport in choice.transports if SERVER in choice.tiers else ():
        if transport not in registered() or transport == "inproc":
            raise UsageError(
                f"--transport {transport}: a transport that joins two processes; "
                f"there are "
                f"{', '.join(name for name in registered() if name != 'inproc')}"
            )
    needed = _ROOM * sum(work.set_bytes for work in choice.works)
    free = shutil.disk_usage(choice.directory).free
    if DISK in choice.tiers and free < needed:
        raise UsageError(
            f"--directory {choice.directory}: {free} bytes are free, and {needed} "
            f"needed; name another one, or give a smaller --round-mib"
        )


def _notes(choice: Choice) -> list[str]:
    notes = [
        f"A put or get: {size_name(work.set_bytes)}, {work.set_blocks} blocks of "
        f"{work.layers} fragments of {size_name(work.layer_bytes)}, scattered."
        for work in choice.works
    ]
    notes += [
        "Of every get of kvwire each byte is compared with what was put. Of the others",
        "only a transfer has checksums, and blocks that lie scattered.",
    ]
    if DISK in choice.tiers:
        notes += [
            f"disk: {filesystem(choice.directory)}. A put ends in the page cache, or",
            "flushed with an fsync; a get reads the page cache, or cold the device.",
            "file: pwrite and preadv of 16 MiB at once.",
        ]
        if not can_drop(choice.directory):
            notes.append("No cold get: here files stay in memory, or nobody can tell.")
    if SERVER in choice.tiers:
        notes += [
            "server: another process of this host, with the blocks in memory.",
            "redis: SET and GET in a row over loopback, a value for each block.",
        ]
    return notes
