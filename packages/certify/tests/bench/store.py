"""Blocks into the tiers of a store and out again, beside the same work without one.

A *set* is the blocks of one call. They are scattered over a pool of memory, as in
``kvwire bench fragments``. The tier has room for more than two sets, and the memory in
front of it for one. Each get reads the less recently used of the last two sets, so it
always reads from the tier. The store is always full: each new block replaces an older
one.

What stands beside it is what is left without a store: a copy, a file, a transfer, a
socket, objects, redis. None of those has hashes, an index, eviction, scattered blocks
or, but for the transfer, checksums; so the ratio is what that costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, Final

import numpy as np

import kvwire
import kvwire_store
from kvwire.limits import KIB, MIB
from kvwire_certify.bench.line import HOST, Line, Seconds, each_timed, turns
from kvwire_certify.bench.work import LEFT, RIGHT, Pool, Work
from kvwire_store.limits import STORE_SLOTS_MAX

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


def work_of(verb: str, shape: str, round_bytes: int) -> Work:
    """Return a work of about ``round_bytes``, in blocks of a shape.

    It moves ``count`` blocks of ``nbytes``: a part of a set of ``blocks``, or several.
    """
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
    nbytes = layers * layer_bytes
    return Work(verb=verb, nbytes=nbytes, count=count, layers=layers, blocks=blocks)


def set_bytes(work: Work) -> int:
    return work.nbytes * work.blocks


def transfer_of(work: Work) -> Work:
    """Return a set as a transfer between two caches."""
    verb = "push" if work.verb in PUTS else "pull"
    return replace(work, verb=verb, nbytes=set_bytes(work), count=1)


def _room(work: Work, sets: int) -> tuple[int, int]:
    """Return the bytes of exactly ``sets`` sets, and of one slab."""
    slab_blocks = max(1, min(work.blocks // _SLABS, STORE_SLOTS_MAX))
    return sets * set_bytes(work), slab_blocks * work.nbytes


class BlockMover(ABC):
    """Moves sets of blocks into one place and out of it, for each block size."""

    @abstractmethod
    async def ready(self, work: Work, offer: Any) -> None:
        """Prepare a round; a server offers its address."""

    async def fill(self, work: Work) -> None:
        """Put random bytes into the two sets that later rounds get."""
        await self.put(work)
        await self.put(work)

    @abstractmethod
    async def put(self, work: Work) -> None:
        """Put a set, and wait until it is stored."""

    @abstractmethod
    async def get(self, work: Work) -> None:
        """Get the less recently used set."""

    @abstractmethod
    async def get_one(self, work: Work, at: int) -> None:
        """Get one block of that set, starting with the first one."""

    async def match(self, work: Work) -> None:
        """Match the hashes of a set, or the first one of them."""
        raise NotImplementedError

    @abstractmethod
    async def verify(self, work: Work) -> None:
        """Raise if a round's gets returned other bytes than were put."""

    async def move(self, work: Work) -> Seconds:
        """Time a put or get of each set, or each of several gets or matches."""
        if work.verb in MATCHES:
            return await each_timed(LOOKUPS, lambda _: self.match(work))
        if work.verb == ONE:
            return await each_timed(work.count, lambda at: self.get_one(work, at))
        once = self.put if work.verb in PUTS else self.get
        sets = work.count // work.blocks
        return await each_timed(sets, lambda _: once(work))

    async def rounds(self, line: Line) -> None:
        """Do all works of a benchmark."""
        async for turn in turns(line):
            work = turn.work
            await self.ready(work, turn.offer)
            if turn.checks:
                await self.fill(work)
            began_s = self.cpu_s()
            seconds = await self.move(work)
            cpu_s = self.cpu_s() - began_s
            await self.verify(work)
            await line.send({"seconds": seconds, "cpu_s": cpu_s, "digest": ""})

    def cpu_s(self) -> float:
        """Return the CPU seconds that this has used."""
        return time.process_time()


async def store(line: Line, options: dict[str, Any]) -> None:
    """Move blocks into a store and out of it.

    The options are ``tier``, the tier to measure, and ``place``, its folder on a disk.
    """
    async with AsyncExitStack() as opened:
        facts = {"kvwire": kvwire.__version__, "numpy": np.__version__}
        await line.send({"facts": facts})
        await StoreBlocks(options, opened).rounds(line)


async def server(line: Line, _: dict[str, Any]) -> None:
    """Serve a store in memory for each size of blocks."""
    addresses: dict[int, str] = {}
    async with AsyncExitStack() as opened:
        await line.send({"address": "", "facts": {}})
        async for turn in turns(line):
            work = turn.work
            if work.nbytes not in addresses:
                opening = kvwire_store.BlockStore.open([_memory(work, SETS)])
                served = kvwire_store.StoreServer(
                    await opened.enter_async_context(opening), f"{HOST}:0"
                )
                where = (await opened.enter_async_context(served)).address
                addresses[work.nbytes] = f"{where.host}:{where.port}"
            began_s = time.process_time()
            await line.send({"offer": addresses[work.nbytes]})
            await line.receive()
            await line.send({"cpu_s": time.process_time() - began_s, "digest": ""})


@dataclass(slots=True)
class Stock:
    """Blocks of one size: a cache to put from, a cache to get into, and a store."""

    store: kvwire_store.BlockStore
    # The store for gets. With memory in front, gets from a server would find the put's
    # blocks.
    reader: kvwire_store.BlockStore
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

    def __init__(self, options: dict[str, Any], opened: AsyncExitStack) -> None:
        self._options = options
        self._opened = opened
        self.stocks: dict[int, Stock] = {}

    async def ready(self, work: Work, offer: Any) -> None:
        if work.nbytes not in self.stocks:
            self.stocks[work.nbytes] = await self._new_stock(work, offer)
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

    async def _new_stock(self, work: Work, server: str | None) -> Stock:
        place = self._options.get("place")
        directory = f"{place}/{work.nbytes}" if place else ""
        size, slab = _room(work, SETS)
        # The memory in front has room for one set, so the next set to get is not in it.
        tiers = {
            MEMORY: [_memory(work, SETS)],
            DISK: [_memory(work, 1), f"disk:{directory}?size={size}B&slab={slab}B"],
            SERVER: [_memory(work, 1), f"kvwire://{server}"],
            OBJECT: [_memory(work, 1), f"object:file://{directory}"],
        }[self._options["tier"]]
        opened = [
            await self._opened.enter_async_context(kvwire_store.BlockStore.open(tiers))
            for _ in range(2 if server else 1)
        ]
        transfer = transfer_of(work)
        # Written to first, so that timing includes no page faults.
        have, want = (
            Pool(np.ones(transfer.memory_bytes, np.uint8), transfer, side)
            for side in (LEFT, RIGHT)
        )
        return Stock(opened[0], opened[-1], directory, have, want)

    async def fill(self, work: Work) -> None:
        memory = self.stocks[work.nbytes].have.memory
        memory[:] = np.frombuffer(np.random.default_rng().bytes(memory.size), np.uint8)
        await super().fill(work)

    async def put(self, work: Work) -> None:
        stock = self.stocks[work.nbytes]
        # New hashes: blocks under earlier names would be present already.
        names = [secrets.token_bytes(HASH_BYTES) for _ in range(work.blocks)]
        outcome = await stock.store.put(names, *stock.have.chosen)
        if work.verb == FLUSHED_PUT:
            await stock.store.flush()
        _require_complete(outcome)
        stock.sets = [*stock.sets, names][-2:]

    async def get(self, work: Work) -> None:
        await self._get(self.stocks[work.nbytes], range(work.blocks))

    async def get_one(self, work: Work, at: int) -> None:
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
        _require_complete(await stock.reader.get(names, stock.want.cache, blocks))

    async def match(self, work: Work) -> None:
        """Match a set that is not in the memory in front of the tier."""
        stock = self.stocks[work.nbytes]
        found = await stock.reader.match(stock.sets[0][: work.count], stock.want.cache)
        if found != work.count:
            raise RuntimeError(f"{found} of {work.count} hashes match")

    async def verify(self, work: Work) -> None:
        """Compare a round's gets with the puts; the latest put is read first."""
        stock = self.stocks[work.nbytes]
        if work.verb in MATCHES:
            return
        if work.verb in PUTS:
            got = await stock.store.get(stock.sets[-1], *stock.want.chosen)
            _require_complete(got)
        else:
            came = stock.read() - stock.read_blocks
            if came != work.count:
                raise RuntimeError(
                    f"{came} of {work.count} blocks were read from the measured tier"
                )
            if work.count < work.blocks:
                # Its other blocks were not used, and are evicted first.
                stock.sets.pop()
                if stock.reader is not stock.store:
                    stock.sets.clear()  # the content of its memory is unknown
        await asyncio.to_thread(compare, stock, work)


def compare(stock: Stock, work: Work) -> None:
    """Compare the first blocks of the target cache with the blocks that were put."""
    have, want = (
        pool.fragments().reshape(work.layers, work.blocks, -1)[:, : work.count]
        for pool in (stock.have, stock.want)
    )
    if not np.array_equal(have, want):
        raise RuntimeError("get returned other bytes than put had stored")


def _memory(work: Work, sets: int) -> str:
    size, slab = _room(work, sets)
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


def _require_complete(outcome: kvwire.Outcome) -> None:
    if not outcome.complete:
        raise RuntimeError(f"{len(outcome.missing)} blocks are missing")
