"""A store of kvwire with one tier that is measured, and a server that can be one.

A *set* is the blocks of one call. Its memory is a pool in which they lie scattered, as
in ``kvwire bench fragments``. A tier has room for more than two sets and the memory in
front of it for one, and what is got is the one of the last two sets that was used
longer ago: so it comes from that tier each time, and the store is in its steady state,
in which everything that comes in takes the room of something older.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, ClassVar, Final

import numpy as np

import kvwire
from kvwire.cli.bench.operations import (
    LEFT,
    RIGHT,
    OpsWork,
    Pool,
    require_complete,
)
from kvwire.cli.bench.side import HOST, BenchSide, Work, each_timed, fill
from kvwire.limits import KIB, MIB
from kvwire.store.limits import STORE_SLOTS_MAX

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
PUTS: Final = (PUT, FLUSHED_PUT)
# In their order; a match is of blocks of a size of its own.
TIERS: Final = {
    MEMORY: (PUT, GET, ONE),
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
# The file of a disk tier, in its directory.
_IMAGES: Final = "images"
# The kernel keeps a page that something else holds just now, such as its own writing.
_DROPS_MAX: Final = 20
_DROP_AGAIN_S: Final = 0.05
_TRIAL_BYTES: Final = 1 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreWork(Work):
    """``count`` blocks of ``nbytes`` into a tier or out of it; see the verbs above."""

    tier: str
    # Of a block.
    layers: int
    # Of a set; ``count`` are moved, some of one set or all of several.
    set_blocks: int

    @property
    def set_bytes(self) -> int:
        """Count the bytes of a set."""
        return self.nbytes * self.set_blocks

    @property
    def fragment_bytes(self) -> int:
        """Count the bytes of one layer of a block."""
        return self.nbytes // self.layers

    @property
    def transfer(self) -> OpsWork:
        """Return the set as a transfer between two caches."""
        return OpsWork(
            verb="push" if self.verb in PUTS else "pull",
            nbytes=self.set_bytes,
            count=1,
            layers=self.layers,
            blocks=self.set_blocks,
        )

    def room(self, sets: int) -> tuple[int, int]:
        """Return the bytes of so many sets and no block more, and of a slab of them."""
        slab_blocks = max(1, min(self.set_blocks // _SLABS, STORE_SLOTS_MAX))
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


class StoreServerSide(BenchSide[StoreWork]):
    """Store servers: one in memory for each size of blocks."""

    work_type: ClassVar[type[Work]] = StoreWork

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._addresses: dict[int, str] = {}

    async def prepare(self, work: StoreWork) -> str:
        """Serve a store for a work; the answer is where."""
        if work.nbytes not in self._addresses:
            enter = self.opened.enter_async_context
            store = await enter(kvwire.BlockStore.open([_memory(work, SETS)]))
            served = await enter(kvwire.StoreServer(store, f"{HOST}:0"))
            where = f"{served.address.host}:{served.address.port}"
            self._addresses[work.nbytes] = where
        return self._addresses[work.nbytes]


class BlocksSide(BenchSide[StoreWork]):
    """Puts sets of blocks somewhere, and gets them back."""

    work_type: ClassVar[type[Work]] = StoreWork

    async def drive(self, work: StoreWork) -> Sequence[float]:
        """Left: time one put or get of a set, or each of several gets or matches."""
        if work.verb == MATCH:
            return await each_timed(LOOKUPS, lambda _: self.match(work))
        if work.verb == ONE:
            return await each_timed(work.count, lambda at: self.get_one(work, at))
        move = self.put if work.verb in PUTS else self.get
        sets = work.count // work.set_blocks
        return await each_timed(sets, lambda _: move(work))

    @abstractmethod
    async def put(self, work: StoreWork) -> None:
        """Put a set, until it is kept."""

    @abstractmethod
    async def get(self, work: StoreWork) -> None:
        """Get the set that was used longer ago."""

    @abstractmethod
    async def get_one(self, work: StoreWork, at: int) -> None:
        """Get one block of it; the first one is asked for first."""

    async def match(self, work: StoreWork) -> None:
        """Match the hashes of a set."""
        raise NotImplementedError


@dataclass(slots=True)
class Stock:
    """Blocks of one size: a cache that has them, one that wants them, and a store."""

    store: kvwire.BlockStore
    # Of a tier on a disk.
    directory: str
    have: Pool
    want: Pool
    # The last two that were put; the one that was used longer ago is first.
    sets: list[list[bytes]] = field(default_factory=list)
    # What came from the tier before this round.
    read_blocks: int = 0

    def read(self) -> int:
        """Count the blocks that came from the tier itself."""
        return [*self.store.stats().values()][-1].read_blocks


class StoreSide(BlocksSide):
    """Keeps a store for each size of blocks, so that no round begins cold."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self.stocks: dict[int, Stock] = {}

    async def connect(self, address: Any) -> dict[str, Any]:
        return {"kvwire": kvwire.__version__, "numpy": np.__version__}

    async def use(self, work: StoreWork, given: str | None) -> None:
        if work.nbytes not in self.stocks:
            self.stocks[work.nbytes] = await self._new_stock(work, given)
        stock = self.stocks[work.nbytes]
        if work.verb == ONE and stock.sets:
            # Of the other set, the last one left some in the memory in front.
            await self.put(work)
        if stock.directory:
            await stock.store.flush()
        while len(stock.sets) < 2 and work.verb not in PUTS:
            await self.put(work)
        if work.verb == COLD_GET:
            drop(Path(stock.directory) / _IMAGES)
        stock.want.memory[:] = 0
        stock.read_blocks = stock.read()

    async def _new_stock(self, work: StoreWork, server: str | None) -> Stock:
        place = self.options.get("place", "")
        directory = f"{place}/{work.nbytes}" if place else ""
        size, slab = work.room(SETS)
        # With memory for one set in front: what is got next is not in it.
        tiers = {
            MEMORY: [_memory(work, SETS)],
            DISK: [_memory(work, 1), f"disk:{directory}?size={size}B&slab={slab}B"],
            SERVER: [_memory(work, 1), f"kvwire://{server}"],
            OBJECT: [_memory(work, 1), f"object:file://{directory}"],
        }[self.options["tier"]]
        opening = kvwire.BlockStore.open(tiers)
        store = await self.opened.enter_async_context(opening)
        transfer = work.transfer
        # Written to, so that no page is missing when it is timed.
        have, want = (
            Pool(np.ones(transfer.memory_bytes, np.uint8), transfer, side)
            for side in (LEFT, RIGHT)
        )
        return Stock(store, directory, have, want)

    async def fill(self, work: StoreWork) -> None:
        await fill(self.stocks[work.nbytes].have.memory)
        # Twice, so that both sets that are got from now on have these bytes.
        await self.put(work)
        await self.put(work)

    async def put(self, work: StoreWork) -> None:
        stock = self.stocks[work.nbytes]
        # Hashes that nobody has used: who gets a block knows its name already.
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
        """Get some of the set that was used longer ago, the first block first."""
        if which[0] == 0:
            stock.sets.reverse()
        names = [stock.sets[-1][at] for at in which]
        blocks = [stock.want.blocks[at] for at in which]
        require_complete(await stock.store.get(names, stock.want.cache, blocks))

    async def match(self, work: StoreWork) -> None:
        """Match a set that is not in the memory in front of a tier."""
        stock = self.stocks[work.nbytes]
        found = await stock.store.match(stock.sets[0])
        if found != work.set_blocks:
            raise RuntimeError(f"{found} of {work.set_blocks} hashes match")

    async def verify(self, work: StoreWork) -> None:
        """Compare what was got with what was put; what was put last is got first."""
        stock = self.stocks[work.nbytes]
        if work.verb == MATCH:
            return
        if work.verb in PUTS:
            got = await stock.store.get(stock.sets[-1], *stock.want.chosen)
            require_complete(got)
        else:
            came = stock.read() - stock.read_blocks
            if came != work.count:
                raise RuntimeError(
                    f"{came} of {work.count} blocks came from the tier itself"
                )
            if work.count < work.set_blocks:
                stock.sets.pop()  # the rest was not used, and goes before older sets
        await asyncio.to_thread(compare, stock, work)


def compare(stock: Stock, work: StoreWork) -> None:
    """Compare the first blocks of the wanted cache with what was put."""
    have, want = (
        pool.fragments().reshape(work.layers, work.set_blocks, -1)[:, : work.count]
        for pool in (stock.have, stock.want)
    )
    if not np.array_equal(have, want):
        raise RuntimeError("what was got are not the bytes that were put")


def _memory(work: StoreWork, sets: int) -> str:
    size, slab = work.room(sets)
    return f"memory:{size}B?slab={slab}B"


def drop(path: Path) -> None:
    """Write a file to the disk, and forget its pages, so that reading it reads that."""
    with path.open("rb") as file:
        for _ in range(_DROPS_MAX):
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not (kept := _kept(file)):
                return
            time.sleep(_DROP_AGAIN_S)
    raise RuntimeError(f"{path}: {kept} pages stay in memory")


def can_drop(directory: Path) -> bool:
    """Say whether files of a directory can be read without their pages in memory.

    A tmpfs has no other place for them, and only Linux says whether a page is there.
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
    """Count the pages of a file that are in memory.

    Reading with ``RWF_NOWAIT`` tells as well, but since Linux 6 it reads ahead too.
    """
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
        first = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        sizes = ctypes.c_void_p(first), ctypes.c_size_t(len(mapped))
        if libc.mincore(*sizes, ctypes.c_void_p(pages.ctypes.data)):
            raise OSError(ctypes.get_errno(), "mincore")
        return int((pages & 1).sum())
