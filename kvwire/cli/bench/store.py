"""``kvwire bench store``: blocks into the tiers of a store and out of them again.

A *set* is the blocks of one call. Its memory is a pool in which they lie scattered, as
in ``kvwire bench fragments``. A tier has room for more than two sets and the memory in
front of it for one, and what is got is the one of the last two sets that was used
longer ago: so it comes from that tier each time, and the store is in its steady state,
in which everything that comes in takes the room of something older.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from kvwire import UsageError
from kvwire.cli.bench.fragments import FragmentWork
from kvwire.cli.bench.pair import Contender, Work
from kvwire.cli.bench.report import COMMON, Common, Rounds, require_known, size_name
from kvwire.cli.bench.turns import (
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    Benchmark,
    Case,
    Missing,
    Others,
)
from kvwire.extras import install_command
from kvwire.limits import KIB, MIB, STORE_SLOTS_MAX

MEMORY: Final = "memory"
DISK: Final = "disk"
SERVER: Final = "server"
OBJECT: Final = "object"

PUT: Final = "put"
FIRST_PUT: Final = "put, new memory"
FLUSHED_PUT: Final = "put, flushed"
GET: Final = "get"
COLD_GET: Final = "get, cold"
ONE: Final = "get of one"
MATCH: Final = "match"
PUTS: Final = (PUT, FIRST_PUT, FLUSHED_PUT)
# In their order; a match is of blocks of a size of its own.
TIERS: Final = {
    MEMORY: (PUT, FIRST_PUT, GET, ONE),
    DISK: (PUT, FLUSHED_PUT, GET, COLD_GET, ONE),
    SERVER: (PUT, GET, ONE),
    OBJECT: (PUT, GET, ONE),
}
# Layers of a block and bytes of one: 64 KiB a token in 32 layers, and 4 KiB a token in
# 16, as on one of many shards, or of a small model.
SHAPES: Final = {"large": (32, 32 * KIB), "small": (16, 4 * KIB)}

# What is matched, and how often in a round.
HASHES: Final = 1000
HASH_BYTES: Final = 32
LOOKUPS: Final = 50
# A prompt's hashes are asked for without its bytes: the blocks under them are tiny.
MATCH_LAYER_BYTES: Final = 4 * KIB
# Enough for a 99th percentile of all rounds, and not minutes where one takes some ms.
ONE_BY_ONE_MAX: Final = 64
# A tier holds more than the two sets that are got, so that a put takes older room.
SETS: Final = 3
# Of a set, at least; a set of few blocks has few in a slab.
_SLABS: Final = 4
# A disk must have room for a tier, for the file beside it, and for a rest of its own.
_ROOM: Final = 2 * SETS + 1
QUICK_ROUNDS: Final = 2
QUICK_MIB: Final = 8

Mebibytes = Annotated[int, Parameter(validator=Number(gte=4, lte=4096))]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreWork(Work):
    """``count`` blocks of ``nbytes`` into a tier or out of it; see the verbs above.

    Attributes:
        tier: Which tier.
        layers: Layers of a block.
        set_blocks: Blocks of a set; ``count`` of them are moved.
    """

    tier: str
    layers: int
    set_blocks: int

    @property
    def set_bytes(self) -> int:
        """Bytes of a set."""
        return self.nbytes * self.set_blocks

    @property
    def layer_bytes(self) -> int:
        """Bytes of a fragment."""
        return self.nbytes // self.layers

    @property
    def transfer(self) -> FragmentWork:
        """The set as a transfer between two caches."""
        return FragmentWork(
            verb="push" if self.verb in PUTS else "pull",
            nbytes=self.layer_bytes,
            count=self.set_blocks * self.layers,
            layers=self.layers,
        )

    def room(self, sets: int) -> tuple[int, int]:
        """Bytes of so many sets and not of a block more, and of a slab of them."""
        slab_blocks = min(self.set_blocks // _SLABS, STORE_SLOTS_MAX)
        return sets * self.set_bytes, slab_blocks * self.nbytes


def work_of(tier: str, verb: str, shape: str, round_bytes: int) -> StoreWork:
    """Make a work of about ``round_bytes`` of blocks of a shape."""
    layers, layer_bytes = SHAPES[shape]
    blocks = max(_SLABS, round_bytes // (layers * layer_bytes))
    # A set has whole slabs.
    blocks -= blocks % (
        _SLABS if blocks < _SLABS * STORE_SLOTS_MAX else STORE_SLOTS_MAX
    )
    count = min(blocks, ONE_BY_ONE_MAX) if verb == ONE else blocks
    if verb == MATCH:
        layers, layer_bytes, count, blocks = 1, MATCH_LAYER_BYTES, HASHES, HASHES
    return StoreWork(
        verb=verb,
        nbytes=layers * layer_bytes,
        count=count,
        tier=tier,
        layers=layers,
        set_blocks=blocks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreChoice:
    """What the user wants to see."""

    tiers: Sequence[str]
    transports: Sequence[str]
    shapes: Sequence[str]
    directory: Path
    round_bytes: int
    loop: str

    @property
    def works(self) -> list[StoreWork]:
        """A put of each shape, which has the sizes of all others."""
        return [work_of(DISK, PUT, shape, self.round_bytes) for shape in self.shapes]


def store(choice: StoreChoice, others: Others | None = None) -> Benchmark:
    """Make the benchmark.

    Args:
        choice: What the user wants to see.
        others: Those who stand beside kvwire.

    Raises:
        UsageError: There is no such tier, transport or directory, or no room in it.
    """
    _require_known(choice)
    others = others or Others()
    absent = Missing("the object tier", install_command("store"))
    without = OBJECT in choice.tiers and find_spec("obstore") is None
    cases: list[Case] = []
    for tier in choice.tiers:
        if tier == SERVER:
            for transport in choice.transports:
                cases += _cases(choice, tier, f"{tier} over {transport}", others)
        elif not (tier == OBJECT and without):
            cases += _cases(choice, tier, tier, others)
    if not cases:
        raise UsageError(f"--tiers {OBJECT} needs obstore: {absent.remedy}")
    return Benchmark(
        name="store",
        cases=cases,
        missing=[*others.missing, *[absent] * without],
        notes=[*_notes(choice), *others.notes],
    )


def _kvwire(choice: StoreChoice, tier: str, name: str) -> Contender:
    """Make a store in one process, or in two where a server is its tier."""
    from kvwire.cli.bench.store_side import (  # noqa: PLC0415 - it imports this
        StoreServerSide,
        StoreSide,
    )

    place = {DISK: choice.directory / "kv", OBJECT: choice.directory / "objects" / "kv"}
    transport = name.rpartition(" ")[2]
    return Contender(
        "kvwire " + name.replace("over ", ""),
        StoreSide,
        StoreServerSide,
        # The only one that both may use.
        environment={"KVWIRE_REQUIRE": transport} if tier == SERVER else {},
        alone=tier != SERVER,
        tier=tier,
        loop=choice.loop,
        place=place.get(tier, ""),
    )


def _cases(choice: StoreChoice, tier: str, name: str, others: Others) -> list[Case]:
    """Make the rows of one tier, shape by shape, and the match at the end."""
    from kvwire.cli.bench.store_side import can_drop  # noqa: PLC0415 - it imports this

    ours = _kvwire(choice, tier, name)
    rows = [
        (verb, shape)
        for shape in choice.shapes
        for verb in TIERS[tier]
        if verb != COLD_GET or can_drop(choice.directory)
    ]
    rows += [(MATCH, choice.shapes[0])] * (tier != OBJECT)
    cases = []
    for verb, shape in rows:
        work = work_of(name, verb, shape, choice.round_bytes)
        beside = (others.matchers if verb == MATCH else others.movers).get(name, ())
        if verb in (FLUSHED_PUT, COLD_GET):
            # A copy has nothing to flush, and never finds anything cold.
            beside = [peer for peer in beside if peer.name != "memcpy"]
        timed = verb in (ONE, MATCH)
        cases.append(
            Case(
                name=f"{size_name(work.nbytes)} {verb}",
                work=work,
                unit=MICROSECONDS if timed else GIGABYTES_PER_SECOND,
                contenders=[ours, *beside],
                tail=timed,
                group=name,
            )
        )
    return cases


def _require_known(choice: StoreChoice) -> None:
    for tier in choice.tiers:
        if tier not in TIERS:
            raise UsageError(f"--tiers {tier}: there are {', '.join(TIERS)}")
    if SERVER in choice.tiers:
        require_known(choice.transports)
    needed = _ROOM * sum(work.set_bytes for work in choice.works)
    free = shutil.disk_usage(choice.directory).free
    if DISK in choice.tiers and free < needed:
        raise UsageError(
            f"--directory {choice.directory}: {free} bytes are free, and {needed} "
            f"needed; name another one, or give a smaller --round-mib"
        )


def _notes(choice: StoreChoice) -> list[str]:
    from kvwire.cli.bench.store_side import can_drop  # noqa: PLC0415 - it imports this

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
    beside: Annotated[
        Callable[[StoreChoice], Others] | None, Parameter(parse=False)
    ] = None,
    rounds: Rounds = 5,
    common: Common = COMMON,
) -> None:
    """Blocks into each tier of a store, and out of it: put, get, one block, match.

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
        beside: Returns who stands beside kvwire; no option of the command.
        rounds: How often everybody does their work; more rounds, firmer medians.
        common: Options of every benchmark.
    """
    if quick:
        rounds, round_mib = QUICK_ROUNDS, QUICK_MIB
    with _within(directory) as place:
        choice = StoreChoice(
            tiers=list(TIERS) if tiers == "all" else tiers.split(","),
            transports=transport.split(","),
            shapes=list(SHAPES) if blocks == "both" else [blocks],
            directory=place,
            round_bytes=round_mib * MIB,
            loop=common.loop,
        )
        benchmark = store(choice, beside(choice) if beside else None)
        settings: dict[str, Any] = {
            "tiers": choice.tiers,
            "transport": choice.transports,
            "filesystem": filesystem(place),
            "blocks": choice.shapes,
            "rounds": rounds,
            "round_mib": round_mib,
        }
        common.run(benchmark, settings)


@contextmanager
def _within(directory: Path | None) -> Iterator[Path]:
    """Make a new directory in this one, removed at the end.

    Raises:
        UsageError: It is none, or cannot be written to.
    """
    if directory is not None and not directory.is_dir():
        raise UsageError(f"--directory {directory}: there is no such directory")
    try:
        made = TemporaryDirectory(prefix="kvwire-bench-", dir=directory)
    except OSError as exc:
        raise UsageError(f"--directory {directory}: {exc.strerror}") from None
    with made as name:
        yield Path(name)
