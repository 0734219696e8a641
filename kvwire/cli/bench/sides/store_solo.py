"""A store of kvwire with one tier that is measured, through its public names."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

import kvwire
from kvwire.cli.bench.case import Work
from kvwire.cli.bench.fragment_work import LEFT, RIGHT
from kvwire.cli.bench.sides.fragments_half import Pool
from kvwire.cli.bench.sides.page_cache import drop
from kvwire.cli.bench.sides.solo import Solo
from kvwire.cli.bench.store_work import (
    COLD_GET,
    DISK,
    FIRST_PUT,
    FLUSHED_PUT,
    HASH_BYTES,
    LOOKUPS,
    MATCH,
    MEMORY,
    OBJECT,
    ONE,
    PUTS,
    SERVER,
    SETS,
    LastTwo,
    StoreWork,
)

# The file of a disk tier, in its directory.
_IMAGES: Final = "images"


class StoreSolo(Solo):
    """One store for each size of blocks; they stay, so that no round begins cold.

    Args:
        tier: What is measured.
        place: The directory of a disk or object tier; empty for others.
    """

    work_type: ClassVar[type[Work]] = StoreWork

    def __init__(self, tier: str, place: str) -> None:
        self._tier = tier
        self._place = place
        self._stocks: dict[int, Stock] = {}

    async def start(self) -> dict[str, Any]:
        """See Solo."""
        return {"kvwire": kvwire.__version__, "numpy": np.__version__}

    async def prepare(self, work: Work, address: str = "") -> dict[str, Any]:
        """See Solo.

        Args:
            work: The work.
            address: Of the server that is the tier; empty for others.
        """
        assert isinstance(work, StoreWork)
        stock = self._stocks.get(work.nbytes)
        if stock is None:
            stock = Stock(work, self._directory(work))
            self._stocks[work.nbytes] = stock
            await stock.open(self._tiers(work, address))
        await stock.prepare(work)
        return {}

    async def check(self, work: Work) -> dict[str, Any]:
        """See Solo."""
        stock = self._stock(work)
        sent = await asyncio.to_thread(stock.have.fill)
        # Twice, so that both sets that are got from now on have these bytes.
        await stock.put()
        await stock.put()
        await stock.get()
        return {"sent": sent, "arrived": await asyncio.to_thread(stock.want.digest)}

    async def drive(self, work: Work) -> dict[str, Any]:
        """See Solo; a put and a get have their rate, others a time for each call."""
        assert isinstance(work, StoreWork)
        stock = self._stock(work)
        if work.verb == MATCH:
            return {"values": await stock.match()}
        if work.verb == ONE:
            return {"values": await stock.one_by_one(work.count)}
        put = work.verb in PUTS
        elapsed_s = await (stock.put(work.verb) if put else stock.get())
        return {"values": [work.moved_bytes / elapsed_s]}

    async def verify(self, work: Work) -> dict[str, Any]:
        """See Solo: compare what was got, or get what was put and compare that."""
        assert isinstance(work, StoreWork)
        stock = self._stock(work)
        if work.verb in PUTS:
            await stock.get_last()
        if work.verb != MATCH:
            await asyncio.to_thread(stock.compare, work.count)
        return {}

    async def close(self) -> None:
        """See Solo."""
        for stock in self._stocks.values():
            await stock.close()

    def _stock(self, work: Work) -> Stock:
        return self._stocks[work.nbytes]

    def _directory(self, work: StoreWork) -> str:
        return f"{self._place}/{work.nbytes}" if self._place else ""

    def _tiers(self, work: StoreWork, address: str) -> list[str]:
        """With memory for one set in front: what is got next is not in it."""
        directory = self._directory(work)
        return {
            MEMORY: [work.memory(SETS)],
            DISK: [work.memory(1), work.disk(directory)],
            SERVER: [work.memory(1), f"kvwire://{address}"],
            OBJECT: [work.memory(1), f"object:file://{directory}"],
        }[self._tier]


class Stock:
    """Blocks of one size: a cache that has them, one that wants them, and a store.

    Args:
        work: One of its works.
        directory: Of its tier, if that has one.

    Attributes:
        have: The cache that blocks are put from.
        want: The cache that they are got into.
    """

    _store: kvwire.BlockStore

    def __init__(self, work: StoreWork, directory: str) -> None:
        nbytes = work.transfer.pool_bytes
        # Written to, so that no page is missing when it is timed.
        self.have: Pool = Pool(np.ones(nbytes, np.uint8), work.transfer, LEFT)
        self.want: Pool = Pool(np.ones(nbytes, np.uint8), work.transfer, RIGHT)
        self._directory = directory
        self._work = work
        self._sets: LastTwo[list[bytes]] = LastTwo()
        self._last: list[bytes] = []
        # A store for one put, whose memory nobody has written to.
        self._new: kvwire.BlockStore | None = None

    async def open(self, tiers: list[str]) -> None:
        """Open the store."""
        self._store = await kvwire.BlockStore.open(tiers)

    async def prepare(self, work: StoreWork) -> None:
        """Get ready for a round: nothing is on its way, and the wanted cache empty."""
        if work.verb == FIRST_PUT:
            await self._close_new()
            self._new = await kvwire.BlockStore.open([work.memory(1)])
        if self._directory:
            await self._store.flush()
        while len(self._sets) < 2 and work.verb not in PUTS:
            await self.put()
        if work.verb == COLD_GET:
            drop(Path(self._directory) / _IMAGES)
        self.want.memory[:] = 0

    async def put(self, verb: str = "") -> float:
        """Put a new set; seconds from the call until it is kept."""
        store = self._new if verb == FIRST_PUT and self._new else self._store
        names = _names(self._work.set_blocks)
        began = time.perf_counter()
        outcome = await store.put(names, self.have.cache, self.have.blocks)
        if verb == FLUSHED_PUT:
            await store.flush()
        elapsed_s = time.perf_counter() - began
        _check(outcome)
        self._last = names
        if store is self._store:
            self._sets.add(names)
        return elapsed_s

    async def get(self) -> float:
        """Get the set that was used longer ago; seconds until it is there."""
        names = self._sets.next()
        before = self._read_blocks()
        began = time.perf_counter()
        outcome = await self._store.get(names, self.want.cache, self.want.blocks)
        elapsed_s = time.perf_counter() - began
        _check(outcome)
        self._came_from_the_tier(before, len(names))
        return elapsed_s

    async def get_last(self) -> None:
        """Get the set that was put last, from wherever it is; not timed."""
        store, self._new = self._new or self._store, None
        _check(await store.get(self._last, self.want.cache, self.want.blocks))
        if store is not self._store:
            await store.close()

    async def one_by_one(self, count: int) -> list[float]:
        """Get some blocks of a set, one after the other; seconds of each."""
        store, cache = self._store, self.want.cache
        pairs = list(zip(self._sets.next(), self.want.blocks, strict=True))[:count]
        clock, values, outcomes = time.perf_counter, [], []
        before = self._read_blocks()
        for name, block in pairs:
            began = clock()
            outcomes.append(await store.get([name], cache, [block]))
            values.append(clock() - began)
        for outcome in outcomes:
            _check(outcome)
        self._came_from_the_tier(before, count)
        return values

    async def match(self) -> list[float]:
        """Match a set that is not in the memory in front of a tier; seconds of each."""
        names, store = self._sets.older(), self._store
        clock, values = time.perf_counter, []
        for _ in range(LOOKUPS):
            began = clock()
            found = await store.match(names)
            values.append(clock() - began)
            if found != len(names):
                raise RuntimeError(f"{found} of {len(names)} hashes match")
        return values

    def compare(self, count: int) -> None:
        """Compare the first blocks of the wanted cache with what was put.

        Raises:
            RuntimeError: They differ.
        """
        shape = (self._work.layers, self._work.set_blocks, self._work.layer_bytes)
        have, want = (
            pool.fragments().reshape(shape)[:, :count]
            for pool in (self.have, self.want)
        )
        if not np.array_equal(have, want):
            raise RuntimeError("what was got are not the bytes that were put")

    async def close(self) -> None:
        """Close the store, and the one that was made for a put."""
        await self._close_new()
        await self._store.close()

    async def _close_new(self) -> None:
        new, self._new = self._new, None
        if new is not None:
            await new.close()

    def _read_blocks(self) -> int:
        """Blocks that have come from the lowest tier."""
        return [*self._store.stats().values()][-1].read_blocks

    def _came_from_the_tier(self, before: int, count: int) -> None:
        came = self._read_blocks() - before
        if came != count:
            raise RuntimeError(f"{came} of {count} blocks came from the tier itself")


def _names(count: int) -> list[bytes]:
    """Hashes that nobody has used: who gets a block knows its name already."""
    drawn = secrets.token_bytes(count * HASH_BYTES)
    return [drawn[at : at + HASH_BYTES] for at in range(0, len(drawn), HASH_BYTES)]


def _check(outcome: kvwire.Outcome) -> None:
    if not outcome.complete:
        reasons = "; ".join(outcome.missing.reasons)
        raise RuntimeError(f"{len(outcome.missing)} blocks are missing: {reasons}")
