"""``kvwire bench store``: blocks into the tiers of a store, and out again.

A *set* is the blocks of one call. They are scattered over a pool of memory, as in
``kvwire bench fragments``. The tier has room for more than two sets, and the memory in
front of it for one. Each get reads the less recently used of the last two sets, so it
always reads from the tier. The store is always full: each new block replaces an older
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import IO, Annotated, Final, Literal

import numpy as np

import kvwire
from kvwire import UsageError
from kvwire.cli.bench.operations import (
    LEFT,
    RIGHT,
    OpsWork,
    Pool,
    require_complete,
)
from kvwire.cli.bench.pair import Contender
from kvwire.cli.bench.report import COMMON, Common, Rounds, require_able, within
from kvwire.cli.bench.side import HOST, Bench, Seconds, Work, each_timed, fill
from kvwire.cli.bench.turns import (
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    Benchmark,
    Case,
    Missing,
)
from kvwire.extras import install_command
from kvwire.limits import KIB, MIB
from kvwire.store.limits import STORE_SLOTS_MAX
from kvwire.types import in_bytes

MEMORY: Final = "memory"
DISK: Final = "disk"
SERVER: Final = "server"
OBJECT: Final = "object"

PUT: Final = "put"
FLUSHED_PUT: Final = "put, flushed"
GET: Final = "get"
COLD_GET: Final = "get, cold"
ONE: Final = "get of one"
MATCH: Final = "match"
MATCH_ONE: Final = "match of one"
MATCHES: Final = (MATCH, MATCH_ONE)
PUTS: Final = (PUT, FLUSHED_PUT)
# In this order; a match uses blocks of its own size.
TIERS: Final = {
    MEMORY: (PUT, GET, ONE),
    DISK: (PUT, FLUSHED_PUT, GET, COLD_GET, ONE),
    SERVER: (PUT, GET, ONE),
    OBJECT: (PUT, GET, ONE),
}
# Layers per block and bytes per layer: 64 KiB per token in 32 layers, and 4 KiB per
# token in 16 layers, as on one of many shards, or for a small model.
SHAPES: Final = {"large": (32, 32 * KIB), "small": (16, 4 * KIB)}

# How many hashes are matched, and how often per round.
HASHES: Final = 1000
HASH_BYTES: Final = 32
LOOKUPS: Final = 50
# Only a prompt's hashes are looked up, not its bytes, so their blocks are tiny.
MATCH_LAYER_BYTES: Final = 4 * KIB
# Enough for a 99th percentile of all rounds, but not minutes if each takes some ms.
ONE_BY_ONE_MAX: Final = 64
# A tier holds more than the two sets that are read, so that a put evicts older blocks.
SETS: Final = 3
# Slabs per set, at least; a set of few blocks has few blocks per slab.
_SLABS: Final = 4
# The file of a disk tier, in its directory.
_IMAGES: Final = "images"
# The kernel keeps pages that are in use at the moment, for example by its own writing.
_DROPS_MAX: Final = 20
_DROP_AGAIN_S: Final = 0.05
_TRIAL_BYTES: Final = 1 * MIB
# A disk must have room for a tier, for the file beside it, and some in reserve.
_ROOM: Final = 2 * SETS + 1
QUICK_ROUNDS: Final = 2
QUICK_MIB: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreWork(Work):
    """``count`` blocks of ``nbytes`` into a tier or out of it; see the verbs above."""

    tier: str
    # The number of layers per block.
    layers: int
    # The number of blocks per set; ``count`` blocks move: a part of a set, or several
    # sets.
    set_blocks: int

    @property
    def set_bytes(self) -> int:
        """The bytes of a set."""
        return self.nbytes * self.set_blocks

    @property
    def fragment_bytes(self) -> int:
        """The bytes of one layer of a block."""
        return self.nbytes // self.layers

    @property
    def transfer(self) -> OpsWork:
        """The set as a transfer between two caches."""
        return OpsWork(
            verb="push" if self.verb in PUTS else "pull",
            nbytes=self.set_bytes,
            count=1,
            layers=self.layers,
            blocks=self.set_blocks,
        )

    def room(self, sets: int) -> tuple[int, int]:
        """Return the bytes of exactly ``sets`` sets, and of one slab."""
        slab_blocks = max(1, min(self.set_blocks // _SLABS, STORE_SLOTS_MAX))
        return sets * self.set_bytes, slab_blocks * self.nbytes


def work_of(tier: str, verb: str, shape: str, round_bytes: int) -> StoreWork:
    """Return a work of about ``round_bytes``, in blocks of a shape."""
    layers, layer_bytes = SHAPES[shape]
    blocks = max(_SLABS, round_bytes // (layers * layer_bytes))
    # A set consists of whole slabs.
    blocks -= blocks % (
        _SLABS if blocks < _SLABS * STORE_SLOTS_MAX else STORE_SLOTS_MAX
    )
    count = min(blocks, ONE_BY_ONE_MAX) if verb == ONE else blocks
    if verb in MATCHES:
        layers = 1
        layer_bytes = MATCH_LAYER_BYTES
        count = HASHES if verb == MATCH else 1
        blocks = HASHES
    return StoreWork(
        verb=verb,
        nbytes=layers * layer_bytes,
        count=count,
        tier=tier,
        layers=layers,
        set_blocks=blocks,
    )


class BlockMover(ABC):
    """Moves sets of blocks into one place and out of it, for each block size."""

    @abstractmethod
    async def ready(self, work: StoreWork) -> None:
        """Prepare a round."""

    async def fill(self, work: StoreWork) -> None:
        """Put random bytes into the two sets that later rounds get."""
        await self.put(work)
        await self.put(work)

    @abstractmethod
    async def put(self, work: StoreWork) -> None:
        """Put a set, and wait until it is stored."""

    @abstractmethod
    async def get(self, work: StoreWork) -> None:
        """Get the less recently used set."""

    @abstractmethod
    async def get_one(self, work: StoreWork, at: int) -> None:
        """Get one block of that set, starting with the first one."""

    async def match(self, work: StoreWork) -> None:
        """Match the hashes of a set, or the first one of them."""
        raise NotImplementedError

    @abstractmethod
    async def verify(self, work: StoreWork) -> None:
        """Raise if a round's gets returned other bytes than were put."""

    async def move(self, work: StoreWork) -> Seconds:
        """Time a put or get of each set, or each of several gets or matches."""
        if work.verb in MATCHES:
            return await each_timed(LOOKUPS, lambda _: self.match(work))
        if work.verb == ONE:
            return await each_timed(work.count, lambda at: self.get_one(work, at))
        once = self.put if work.verb in PUTS else self.get
        sets = work.count // work.set_blocks
        return await each_timed(sets, lambda _: once(work))

    async def rounds(self, b: Bench) -> None:
        """Run all works of a benchmark."""
        async for work in b.works(StoreWork):
            await self.ready(work)
            if b.checks:
                await self.fill(work)
            async with b.clock():
                seconds = await self.move(work)
            await self.verify(work)
            await b.report(seconds)


async def store(b: Bench) -> None:
    """Move blocks into a store and out of it, on the left; serve one on the right.

    The options are ``tier``, the tier to measure, and ``place``, its folder on a disk.
    """
    async with AsyncExitStack() as opened:
        if b.left:
            b.facts |= {"kvwire": kvwire.__version__, "numpy": np.__version__}
            await StoreBlocks(b, opened).rounds(b)
        else:
            await serve_stores(b, opened)


async def serve_stores(b: Bench, opened: AsyncExitStack) -> None:
    """Serve a store in memory for each size of blocks."""
    addresses: dict[int, str] = {}
    async for work in b.works(StoreWork):
        if work.nbytes not in addresses:
            opening = kvwire.BlockStore.open([_memory(work, SETS)])
            served = kvwire.StoreServer(
                await opened.enter_async_context(opening), f"{HOST}:0"
            )
            where = (await opened.enter_async_context(served)).address
            addresses[work.nbytes] = f"{where.host}:{where.port}"
        await b.send(addresses[work.nbytes])
        async with b.clock():
            pass  # the left side does everything
        await b.report()


@dataclass(slots=True)
class Stock:
    """Blocks of one size: a cache to put from, a cache to get into, and a store."""

    store: kvwire.BlockStore
    # The store for gets. With memory in front, gets from a server would find the put's
    # blocks.
    reader: kvwire.BlockStore
    # The file of a disk tier.
    directory: str
    have: Pool
    want: Pool
    # The last two sets that were put; the less recently used one is first.
    sets: list[list[bytes]] = field(default_factory=list)
    # The set that was last read.
    read_last: list[bytes] | None = None
    # How many blocks had been read from the tier before this round.
    read_blocks: int = 0

    def read(self) -> int:
        """Return the number of blocks that came from the tier itself."""
        return [*self.reader.stats().values()][-1].read_blocks


class StoreBlocks(BlockMover):
    """Keeps a store for each block size, so that no round starts cold."""

    def __init__(self, b: Bench, opened: AsyncExitStack) -> None:
        self._b = b
        self._opened = opened
        self.stocks: dict[int, Stock] = {}

    async def ready(self, work: StoreWork) -> None:
        served = self._b.options["tier"] == SERVER
        server = await self._b.receive() if served else ""
        if work.nbytes not in self.stocks:
            self.stocks[work.nbytes] = await self._new_stock(work, server)
        stock = self.stocks[work.nbytes]
        if work.verb == ONE and stock.sets:
            # The last round left some blocks of the other set in the memory in front.
            await self.put(work)
        if stock.directory:
            await stock.store.flush()
        while len(stock.sets) < 2 and work.verb not in PUTS:
            await self.put(work)
        if work.verb == COLD_GET:
            drop(Path(stock.directory) / _IMAGES)
        stock.want.memory[:] = 0
        stock.read_blocks = stock.read()

    async def _new_stock(self, work: StoreWork, server: str) -> Stock:
        place = self._b.options.get("place")
        directory = f"{place}/{work.nbytes}" if place else ""
        size, slab = work.room(SETS)
        # The memory in front has room for one set, so the next set to get is not in it.
        tiers = {
            MEMORY: [_memory(work, SETS)],
            DISK: [_memory(work, 1), f"disk:{directory}?size={size}B&slab={slab}B"],
            SERVER: [_memory(work, 1), f"kvwire://{server}"],
            OBJECT: [_memory(work, 1), f"object:file://{directory}"],
        }[self._b.options["tier"]]
        opened = [
            await self._opened.enter_async_context(kvwire.BlockStore.open(tiers))
            for _ in range(2 if server else 1)
        ]
        transfer = work.transfer
        # Written to first, so that timing includes no page faults.
        have, want = (
            Pool(np.ones(transfer.memory_bytes, np.uint8), transfer, side)
            for side in (LEFT, RIGHT)
        )
        return Stock(opened[0], opened[-1], directory, have, want)

    async def fill(self, work: StoreWork) -> None:
        await fill(self.stocks[work.nbytes].have.memory)
        await super().fill(work)

    async def put(self, work: StoreWork) -> None:
        stock = self.stocks[work.nbytes]
        # New hashes: blocks under earlier names would be present already.
        names = [secrets.token_bytes(HASH_BYTES) for _ in range(work.set_blocks)]
        outcome = await stock.store.put(names, *stock.have.chosen)
        if work.verb == FLUSHED_PUT:
            await stock.store.flush()
        require_complete(outcome)
        stock.sets = [*stock.sets, names][-2:]

    async def get(self, work: StoreWork) -> None:
        await self._get(self.stocks[work.nbytes], range(work.set_blocks))

    async def get_one(self, work: StoreWork, at: int) -> None:
        await self._get(self.stocks[work.nbytes], [at])

    async def _get(self, stock: Stock, which: Sequence[int]) -> None:
        """Get blocks of the less recently used set."""
        if which[0] == 0:
            stock.sets.reverse()
            if stock.reader is not stock.store:
                if stock.sets[-1] is stock.read_last:
                    stock.sets.reverse()  # the other set is not in the memory in front
                stock.read_last = stock.sets[-1]
        names = [stock.sets[-1][at] for at in which]
        blocks = [stock.want.blocks[at] for at in which]
        require_complete(await stock.reader.get(names, stock.want.cache, blocks))

    async def match(self, work: StoreWork) -> None:
        """Match a set that is not in the memory in front of the tier."""
        stock = self.stocks[work.nbytes]
        found = await stock.reader.match(stock.sets[0][: work.count], stock.want.cache)
        if found != work.count:
            raise RuntimeError(f"{found} of {work.count} hashes match")

    async def verify(self, work: StoreWork) -> None:
        """Compare a round's gets with the puts; the latest put is read first."""
        stock = self.stocks[work.nbytes]
        if work.verb in MATCHES:
            return
        if work.verb in PUTS:
            got = await stock.store.get(stock.sets[-1], *stock.want.chosen)
            require_complete(got)
        else:
            came = stock.read() - stock.read_blocks
            if came != work.count:
                raise RuntimeError(
                    f"{came} of {work.count} blocks were read from the measured tier"
                )
            if work.count < work.set_blocks:
                # Its other blocks were not used, and are evicted first.
                stock.sets.pop()
                if stock.reader is not stock.store:
                    stock.sets.clear()  # the content of its memory is unknown
        await asyncio.to_thread(compare, stock, work)


def compare(stock: Stock, work: StoreWork) -> None:
    """Compare the first blocks of the target cache with the blocks that were put."""
    have, want = (
        pool.fragments().reshape(work.layers, work.set_blocks, -1)[:, : work.count]
        for pool in (stock.have, stock.want)
    )
    if not np.array_equal(have, want):
        raise RuntimeError("get returned other bytes than put had stored")


def _memory(work: StoreWork, sets: int) -> str:
    size, slab = work.room(sets)
    return f"memory:{size}B?slab={slab}B"


def drop(path: Path) -> None:
    """Flush a file and drop its cached pages, so that the next read uses the disk."""
    with path.open("rb") as file:
        for _ in range(_DROPS_MAX):
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not (kept := _kept(file)):
                return
            time.sleep(_DROP_AGAIN_S)
    raise RuntimeError(f"{path}: {kept} pages stay in memory")


def can_drop(directory: Path) -> bool:
    """Return whether files of a directory can be read without cached pages.

    A tmpfs has no other copy of its pages. Only Linux reports whether a page is cached.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    with NamedTemporaryFile(dir=directory) as trial:
        trial.write(bytes(_TRIAL_BYTES))
        trial.flush()
        with contextlib.suppress(OSError, RuntimeError):
            drop(Path(trial.name))
            return True
    return False


def _kept(file: IO[bytes]) -> int:
    """Return the number of a file's cached pages.

    Reading with ``RWF_NOWAIT`` would show it too, but reads ahead since Linux 6.
    """
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
        first = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        sizes = ctypes.c_void_p(first), ctypes.c_size_t(len(mapped))
        if libc.mincore(*sizes, ctypes.c_void_p(pages.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore")
        return int((pages & 1).sum())


# --- the command ----------------------------------------------------------------------

Mebibytes = Annotated[int, within(4, 4096)]


def contender(tier: str, transport: str, place: Path, loop: str) -> Contender:
    """Make a contender: one process, or two if the tier is a store server."""
    places = {DISK: place / "kv", OBJECT: place / "objects" / "kv"}
    return Contender(
        f"kvwire {tier} {transport}".rstrip(),
        store,
        # The only path that both processes may use.
        environment={"KVWIRE_REQUIRE": transport} if transport else {},
        alone=tier != SERVER,
        options={"tier": tier, "loop": loop, "place": str(places.get(tier, ""))},
    )


def benchmark(
    tiers: Sequence[str],
    transports: Sequence[str],
    shapes: Sequence[str],
    place: Path,
    round_bytes: int,
    loop: str,
) -> Benchmark:
    """Return the benchmark: each tier's rows, by shape, then its matches."""
    for tier in tiers:
        if tier not in TIERS:
            raise UsageError(f"--tiers {tier}: choose from {', '.join(TIERS)}")
    if SERVER in tiers:
        require_able([*transports])
    # A put of each shape has the same sizes as all others.
    puts = [work_of(DISK, PUT, shape, round_bytes) for shape in shapes]
    free = shutil.disk_usage(place).free
    needed = sum(w.set_bytes for w in puts) * _ROOM
    if DISK in tiers and free < needed:
        raise UsageError(
            f"--directory {place}: {free} bytes are free and {needed} are needed; "
            "choose another directory, or a smaller --round-mib"
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
            if tier != OBJECT:
                rows += [(verb, shapes[0]) for verb in MATCHES]
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
    notes.append("Every byte of every get is compared with the put.")
    if DISK in tiers:
        notes += [
            f"disk: {filesystem(place)}. A put ends in the page cache, or with",
            "an fsync on the disk; a get reads the page cache, or, cold, the disk.",
        ]
        if not cold:
            notes.append("No cold get: files may stay in memory here.")
    if SERVER in tiers:
        notes.append("server: another process on this host, with blocks in memory.")
    return notes


def _case(ours: Contender, work: StoreWork) -> Case:
    timed = work.verb in (ONE, *MATCHES)
    return Case(
        name=f"{in_bytes(work.nbytes)} {work.verb}",
        work=work,
        unit=MICROSECONDS if timed else GIGABYTES_PER_SECOND,
        ours=[ours],
        tail=timed,
        group=work.tier,
    )


def filesystem(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return a directory's file system, such as ``ext4 on /dev/vda``."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return "a file system that this platform does not name"
    real = directory.resolve()
    found = {Path("/"): "an unknown file system"}
    # Of two file systems at one place, the later one hides the other.
    for line in filter(None, lines):
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

    Each tier is measured in its steady state: it is full, and the blocks to get are in
    no tier above it. With all tiers and --round-mib 64, this takes about 8 GiB of
    memory.

    Args:
        tiers: Some of memory, disk, server and object, separated by commas; or all. The
            object tier needs the extra `store`, and uses a directory.
        transport: The transports to the store server, separated by commas.
        directory: Where the disk and object tiers write, in a subdirectory that is
            removed at the end; by default the one for temporary files. The disk needs
            14 times --round-mib, and objects twice that for every round.
        blocks: large: 1 MiB, with 64 KiB per token in 32 layers; small: 64 KiB, with 4
            KiB per token in 16 layers.
        round_mib: MiB of one put or get.
        quick: 2 rounds of 8 MiB, as a smoke test; the figures mean little.
        rounds: The number of rounds; more rounds give firmer medians.
        common: Options of every benchmark.
    """
    if quick:
        rounds = QUICK_ROUNDS
        round_mib = QUICK_MIB
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
