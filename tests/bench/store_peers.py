"""What stands beside a store in one process: a memcpy, a dict, a file, objects."""

from __future__ import annotations

import asyncio
import os
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from kvwire.cli.bench.side import Bytes, Side, require_same
from kvwire.cli.bench.store_side import (
    COLD_GET,
    FIRST_PUT,
    FLUSHED_PUT,
    HASH_BYTES,
    LOOKUPS,
    MATCH,
    ONE,
    PUTS,
    SETS,
    StoreWork,
    drop,
)
from kvwire.limits import STORE_BATCH_BYTES, STORE_OBJECT_REQUESTS, STORE_TIMEOUT_S
from kvwire.store.address import TierAddress
from kvwire.store.tiers.object import bucket_of


class FlatSet:
    """A set of blocks side by side: those that are there, and those that are wanted."""

    def __init__(self, work: StoreWork) -> None:
        rng = np.random.default_rng()
        self.have = rng.integers(0, 256, work.set_bytes, np.uint8)
        self.want = np.ones(work.set_bytes, np.uint8)
        # The last two; the one that was used longer ago is first.
        self.sets: list[int] = []
        self.number = 0

    def next(self) -> int:
        """The one that was used longer ago, which is now the one that was used last."""
        self.sets.reverse()
        return self.sets[-1]

    def blocks(self, work: StoreWork) -> list[int]:
        """Where the blocks of a work begin, in the order in which they are moved."""
        order = np.random.default_rng(0).permutation(work.set_blocks)[: work.count]
        begins: list[int] = (order * work.nbytes).tolist()
        return begins


class PeerSide(Side[StoreWork]):
    """Moves sets of blocks that lie side by side, at each size of blocks."""

    work_type = StoreWork

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._sets: dict[int, FlatSet] = {}

    async def use(self, work: StoreWork, given: None) -> None:
        self.flat(work).want[:] = 0
        await self.ready(work)

    async def fill(self, work: StoreWork) -> None:
        # Twice, so that both sets that are got from now on have these bytes.
        for _ in range(2 * (work.verb != FIRST_PUT)):
            await self.put(work, self.flat(work))

    async def drive(self, work: StoreWork) -> dict[str, Any]:
        flat = self.flat(work)
        if work.verb == ONE:
            return {"values": await self.one_by_one(work, flat)}
        began = time.perf_counter()
        await (self.put if work.verb in PUTS else self.get)(work, flat)
        return {"values": [work.moved_bytes / (time.perf_counter() - began)]}

    async def verify(self, work: StoreWork) -> None:
        flat = self.flat(work)
        for begin in [] if work.verb in (*PUTS, MATCH) else flat.blocks(work):
            part = slice(begin, begin + work.nbytes)
            if not np.array_equal(flat.have[part], flat.want[part]):
                raise RuntimeError("what was got are not the bytes that were put")

    async def ready(self, work: StoreWork) -> None:
        """Get ready for a round."""

    @abstractmethod
    async def put(self, work: StoreWork, flat: FlatSet) -> None:
        """Put a set."""

    @abstractmethod
    async def get(self, work: StoreWork, flat: FlatSet) -> None:
        """Get the set that was used longer ago."""

    @abstractmethod
    async def get_one(self, work: StoreWork, flat: FlatSet, begin: int) -> None:
        """Get one block of it."""

    async def one_by_one(self, work: StoreWork, flat: FlatSet) -> list[float]:
        """Get the blocks of a work; seconds of each."""
        clock, values = time.perf_counter, []
        for begin in flat.blocks(work):
            began = clock()
            await self.get_one(work, flat, begin)
            values.append(clock() - began)
        return values

    def flat(self, work: StoreWork) -> FlatSet:
        """The set of this size."""
        if work.nbytes not in self._sets:
            self._sets[work.nbytes] = FlatSet(work)
        return self._sets[work.nbytes]


class CopySide(PeerSide):
    """Copies by NumPy: what memory does at best."""

    # Memory that nobody has written to.
    _new: Bytes = np.empty(0, np.uint8)

    async def connect(self, address: Any) -> dict[str, Any]:
        return {"numpy": np.__version__}

    async def ready(self, work: StoreWork) -> None:
        if work.verb == FIRST_PUT:
            self._new = np.empty(work.set_bytes, np.uint8)

    async def put(self, work: StoreWork, flat: FlatSet) -> None:
        np.copyto(self._new if work.verb == FIRST_PUT else flat.want, flat.have)

    async def get(self, work: StoreWork, flat: FlatSet) -> None:
        np.copyto(flat.want, flat.have)

    async def get_one(self, work: StoreWork, flat: FlatSet, begin: int) -> None:
        part = slice(begin, begin + work.nbytes)
        np.copyto(flat.want[part], flat.have[part])


class FileSide(PeerSide):
    """``os.pwrite`` and ``os.preadv`` in as large pieces as a store uses."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._place = Path(options["place"])
        self._files: dict[int, int] = {}

    async def ready(self, work: StoreWork) -> None:
        os.fsync(self._file(work))
        if work.verb == COLD_GET:
            drop(self._path(work))

    async def put(self, work: StoreWork, flat: FlatSet) -> None:
        file, number = self._file(work), flat.number
        flat.number = (number + 1) % SETS
        for first in range(0, work.set_bytes, STORE_BATCH_BYTES):
            piece = flat.have[first : first + STORE_BATCH_BYTES]
            moved = os.pwrite(file, piece.data, number * work.set_bytes + first)
            _require(moved, piece.size)
        if work.verb == FLUSHED_PUT:
            os.fsync(file)
        flat.sets = [*flat.sets, number][-2:]

    async def get(self, work: StoreWork, flat: FlatSet) -> None:
        begin = flat.next() * work.set_bytes
        for first in range(0, work.set_bytes, STORE_BATCH_BYTES):
            piece = flat.want[first : first + STORE_BATCH_BYTES]
            moved = os.preadv(self._file(work), [piece.data], begin + first)
            _require(moved, piece.size)

    async def get_one(self, work: StoreWork, flat: FlatSet, begin: int) -> None:
        piece = flat.want[begin : begin + work.nbytes]
        _require(os.preadv(self._file(work), [piece.data], begin), piece.size)

    async def close(self) -> None:
        for file in self._files.values():
            os.close(file)

    def _path(self, work: StoreWork) -> Path:
        return self._place / f"{work.nbytes}"

    def _file(self, work: StoreWork) -> int:
        if work.nbytes not in self._files:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            file = self._files[work.nbytes] = os.open(self._path(work), flags, 0o600)
            # As the file of a disk tier, which has its room from the beginning.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, SETS * work.set_bytes)
        return self._files[work.nbytes]


class ObjectSide(PeerSide):
    """obstore alone: an object for each block, as many at once as a tier has."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._place = options["place"]

    async def connect(self, address: Any) -> dict[str, Any]:
        address = TierAddress.parse(f"object:file://{self._place}")
        self._store = bucket_of(address, STORE_TIMEOUT_S)
        return {"obstore": version("obstore")}

    async def put(self, work: StoreWork, flat: FlatSet) -> None:
        number = flat.number
        flat.number += 1

        async def put_block(begin: int) -> None:
            data = flat.have[begin : begin + work.nbytes].data
            await self._store.put_async(_object(work, number, begin), data)

        await self._all(work, put_block)
        flat.sets = [*flat.sets, number][-2:]

    async def get(self, work: StoreWork, flat: FlatSet) -> None:
        number = flat.next()
        await self._all(work, lambda begin: self._get(work, flat, number, begin))

    async def get_one(self, work: StoreWork, flat: FlatSet, begin: int) -> None:
        await self._get(work, flat, flat.number - 1, begin)

    async def _get(
        self, work: StoreWork, flat: FlatSet, number: int, begin: int
    ) -> None:
        found = await self._store.get_async(_object(work, number, begin))
        data = np.frombuffer(await found.bytes_async(), np.uint8)
        flat.want[begin : begin + work.nbytes] = data

    async def _all(
        self, work: StoreWork, move: Callable[[int], Awaitable[None]]
    ) -> None:
        begins = iter(range(0, work.set_bytes, work.nbytes))

        async def lane() -> None:
            for begin in begins:
                await move(begin)

        await asyncio.gather(*(lane() for _ in range(STORE_OBJECT_REQUESTS)))


class DictSide(Side[StoreWork]):
    """A dict with as many hashes, and nothing else."""

    work_type = StoreWork

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._hashes: list[bytes] = []

    async def use(self, work: StoreWork, given: None) -> None:
        if not self._hashes:
            self._hashes = [os.urandom(HASH_BYTES) for _ in range(work.count)]
        require_same(self._found(self._table()), work.count)

    async def drive(self, work: StoreWork) -> dict[str, Any]:
        table, clock, values = self._table(), time.perf_counter, []
        for _ in range(LOOKUPS):
            began = clock()
            self._found(table)
            values.append(clock() - began)
        return {"values": values}

    def _table(self) -> dict[bytes, int]:
        return dict(zip(self._hashes, range(len(self._hashes)), strict=True))

    def _found(self, table: dict[bytes, int]) -> int:
        slots = np.fromiter(
            map(table.get, self._hashes, repeat(-1)), np.int64, len(self._hashes)
        )
        return int((slots >= 0).sum())


def _object(work: StoreWork, number: int, begin: int) -> str:
    return f"{work.nbytes}/{number}/{begin}"


def _require(moved: int, wanted: int) -> None:
    if moved != wanted:
        raise RuntimeError(f"{moved} of {wanted} bytes were moved")
