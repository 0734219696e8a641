"""``kvwire bench store``: blocks into the tiers of a store and out of them again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final, Literal

from kvwire import UsageError
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.report import COMMON, Common, Rounds, require_able, within
from kvwire.cli.bench.store_side import (
    COLD_GET,
    DISK,
    MATCH,
    OBJECT,
    ONE,
    PUT,
    SERVER,
    SETS,
    SHAPES,
    TIERS,
    StoreServerSide,
    StoreSide,
    StoreWork,
    can_drop,
    work_of,
)
from kvwire.cli.bench.turns import (
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    Benchmark,
    Case,
    Missing,
)
from kvwire.extras import install_command
from kvwire.limits import MIB
from kvwire.types import in_bytes

# A disk must have room for a tier, for the file beside it, and for a rest of its own.
_ROOM: Final = 2 * SETS + 1
QUICK_ROUNDS: Final = 2
QUICK_MIB: Final = 8

Mebibytes = Annotated[int, within(4, 4096)]


def contender(tier: str, transport: str, place: Path, loop: str) -> Contender:
    """Make a store in one process, or in two where a server is its tier."""
    places = {DISK: place / "kv", OBJECT: place / "objects" / "kv"}
    return Contender(
        f"kvwire {tier} {transport}".rstrip(),
        StoreSide,
        StoreServerSide,
        # The only one that both may use.
        environment={"KVWIRE_REQUIRE": transport} if transport else {},
        alone=tier != SERVER,
        options={"tier": tier, "loop": loop, "place": places.get(tier, "")},
    )


def benchmark(
    tiers: Sequence[str],
    transports: Sequence[str],
    shapes: Sequence[str],
    place: Path,
    round_bytes: int,
    loop: str,
) -> Benchmark:
    """Make the benchmark: the rows of each tier, shape by shape, then its match."""
    for tier in tiers:
        if tier not in TIERS:
            raise UsageError(f"--tiers {tier}: there are {', '.join(TIERS)}")
    if SERVER in tiers:
        require_able([*transports])
    # A put of each shape has the sizes of all others.
    puts = [work_of(DISK, PUT, shape, round_bytes) for shape in shapes]
    free, needed = shutil.disk_usage(place).free, sum(w.set_bytes for w in puts) * _ROOM
    if DISK in tiers and free < needed:
        raise UsageError(
            f"--directory {place}: {free} bytes are free, and {needed} needed; name "
            "another one, or give a smaller --round-mib"
        )
    missing = []
    if OBJECT in tiers and find_spec("obstore") is None:
        missing.append(Missing("the object tier", install_command("store")))
        tiers = [tier for tier in tiers if tier != OBJECT]
        if not tiers:
            raise UsageError(f"--tiers {OBJECT} needs obstore: {missing[0].remedy}")
    cold = DISK in tiers and can_drop(place)
    cases = []
    for tier in tiers:
        for transport in transports if tier == SERVER else ("",):
            ours = contender(tier, transport, place, loop)
            group = f"{tier} over {transport}" if transport else tier
            rows = [(verb, shape) for shape in shapes for verb in TIERS[tier]]
            rows += [(MATCH, shapes[0])] * (tier != OBJECT)
            cases += [
                _case(ours, work_of(group, verb, shape, round_bytes))
                for verb, shape in rows
                if verb != COLD_GET or cold
            ]
    return Benchmark(
        name="store",
        cases=cases,
        missing=missing,
        notes=_notes(tiers, puts, place, cold),
    )


def _notes(
    tiers: Sequence[str], puts: Sequence[StoreWork], place: Path, cold: bool
) -> list[str]:
    notes = [
        f"A put or get: {in_bytes(work.set_bytes)}, {work.set_blocks} blocks of "
        f"{work.layers} fragments of {in_bytes(work.fragment_bytes)}, scattered."
        for work in puts
    ]
    notes.append("Of every get each byte is compared with what was put.")
    if DISK in tiers:
        notes += [
            f"disk: {filesystem(place)}. A put ends in the page cache, or",
            "flushed with an fsync; a get reads the page cache, or cold the device.",
        ]
        if not cold:
            notes.append("No cold get: here files stay in memory, or nobody can tell.")
    if SERVER in tiers:
        notes.append("server: another process of this host, with blocks in memory.")
    return notes


def _case(ours: Contender, work: StoreWork) -> Case:
    timed = work.verb in (ONE, MATCH)
    return Case(
        name=f"{in_bytes(work.nbytes)} {work.verb}",
        work=work,
        unit=MICROSECONDS if timed else GIGABYTES_PER_SECOND,
        ours=[ours],
        tail=timed,
        group=work.tier,
    )


def filesystem(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Name what a directory lies on, such as ``ext4 on /dev/vda``: a disk's speed."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return "a file system that this platform does not name"
    real, found = directory.resolve(), {Path("/"): "an unknown file system"}
    for line in filter(None, lines):  # of two at one place the later hides the other
        what, where, kind, *_ = (word.replace(r"\040", " ") for word in line.split())
        found[Path(where)] = f"{kind} on {what}"
    around = [place for place in found if real.is_relative_to(place)]
    return found[max(around, key=lambda place: len(place.parts))]


def command(
    *,
    tiers: str = "all",
    transport: str = "tcp,local",
    directory: Path | None = None,
    blocks: Literal["large", "small", "both"] = "both",
    round_mib: Mebibytes = 64,
    quick: bool = False,
    rounds: Rounds = 5,
    common: Common = COMMON,
) -> int:
    """Measure blocks into each tier of a store and out: put, get, one block, match.

    Each tier is in its steady state: it is full, and what is got is in no
    tier above it. With all tiers and --round-mib 64 it takes some 8 GiB of memory.

    Args:
        tiers: Of memory, disk, server and object, separated by commas; or all. The
            last needs obstore, the extra store, and uses a directory.
        transport: To the server, of kvwire, separated by commas.
        directory: Where the disk and object tiers write, in a directory that is
            removed at the end; by default one for temporary files. The disk is used
            with --round-mib times 14, objects with twice that for every round.
        blocks: large: 1 MiB, 64 KiB a token in 32 layers; small: 64 KiB, 4 KiB a
            token in 16 layers.
        round_mib: MiB of one put or get.
        quick: 2 rounds of 8 MiB, to see that it runs; such figures mean little.
        rounds: How often everybody does their work; more rounds, firmer medians.
        common: Options of every benchmark.
    """
    if quick:
        rounds, round_mib = QUICK_ROUNDS, QUICK_MIB
    names = list(TIERS) if tiers == "all" else tiers.split(",")
    transports = transport.split(",")
    shapes = list(SHAPES) if blocks == "both" else [blocks]
    if directory is not None and not directory.is_dir():
        raise UsageError(f"--directory {directory}: there is no such directory")
    try:
        made = TemporaryDirectory(prefix="kvwire-bench-", dir=directory)
    except OSError as exc:
        raise UsageError(f"--directory {directory}: {exc.strerror}") from None
    with made as name:
        place = Path(name)
        return common.run(
            benchmark(names, transports, shapes, place, round_mib * MIB, common.loop),
            tiers=names,
            transport=transports,
            filesystem=filesystem(place),
            blocks=shapes,
            rounds=rounds,
            round_mib=round_mib,
        )
