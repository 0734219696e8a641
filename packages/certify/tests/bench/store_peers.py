"""What stands beside a store in one process: a memcpy, a file, objects."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from kvwire_certify.bench.line import Line
from kvwire_certify.bench.work import Bytes, Work
from kvwire_store.address import TierAddress
from kvwire_store.limits import (
    STORE_BATCH_BYTES,
    STORE_OBJECT_REQUESTS,
    STORE_TIMEOUT_S,
)
from kvwire_store.tiers.object import bucket_of
from packages.certify.tests.bench.store import (
    COLD_GET,
    FLUSHED_PUT,
    MATCHES,
    PUTS,
    SETS,
    BlockMover,
    drop,
    set_bytes,
)


class FlatSet:
    """A set of blocks side by side: those that are there, and those that are wanted."""

    def __init__(self, work: Work) -> None:
        rng = np.random.default_rng()
        self.have = rng.integers(0, 256, set_bytes(work), np.uint8)
        self.want = np.ones(set_bytes(work), np.uint8)
        # Where they begin, in the order in which single ones are moved.
        order = np.random.default_rng(0).permutation(work.blocks) * work.nbytes
        self.blocks: list[int] = order.tolist()
        # The last two that were put; the one that was used longer ago is first.
        self.sets: list[int] = []
        self.number = 0
        self._nbytes = work.nbytes

    def next(self) -> int:
        """The one that was used longer ago, which is now the one that was used last."""
        self.sets.reverse()
        return self.sets[-1]

    def next_put(self) -> int:
        """The place of the next put, which is now the set that was put last."""
        number = self.number
        self.number = (number + 1) % SETS
        self.sets = [*self.sets, number][-2:]
        return number

    def block(self, at: int) -> tuple[Bytes, Bytes]:
        part = slice(self.blocks[at], self.blocks[at] + self._nbytes)
        return self.have[part], self.want[part]


class FlatBlocks(BlockMover):
    """Moves sets of blocks that lie side by side, at each size of blocks."""

    def __init__(self) -> None:
        self._sets: dict[int, FlatSet] = {}

    async def ready(self, work: Work, offer: Any) -> None:
        self.flat(work).want[:] = 0

    async def verify(self, work: Work) -> None:
        flat = self.flat(work)
        got = [] if work.verb in (*PUTS, *MATCHES) else flat.blocks[: work.count]
        for begin in got:
            part = slice(begin, begin + work.nbytes)
            if not np.array_equal(flat.have[part], flat.want[part]):
                raise RuntimeError("get returned other bytes than put had stored")

    def flat(self, work: Work) -> FlatSet:
        if work.nbytes not in self._sets:
            self._sets[work.nbytes] = FlatSet(work)
        return self._sets[work.nbytes]


class MemoryBlocks(FlatBlocks):
    """Copies by NumPy: what memory does at best."""

    async def put(self, work: Work) -> None:
        flat = self.flat(work)
        np.copyto(flat.want, flat.have)

    async def get(self, work: Work) -> None:
        flat = self.flat(work)
        np.copyto(flat.want, flat.have)

    async def get_one(self, work: Work, at: int) -> None:
        have, want = self.flat(work).block(at)
        np.copyto(want, have)


class FileBlocks(FlatBlocks):
    """``os.pwrite`` and ``os.preadv`` in as large pieces as a store uses."""

    def __init__(self, place: Path, opened: ExitStack) -> None:
        super().__init__()
        self._place = place
        self._opened = opened
        self._files: dict[int, int] = {}

    async def ready(self, work: Work, offer: Any) -> None:
        await super().ready(work, offer)
        os.fsync(self._file(work))
        if work.verb == COLD_GET:
            drop(self._path(work))

    async def put(self, work: Work) -> None:
        file, flat = self._file(work), self.flat(work)
        number = flat.next_put()
        for first in range(0, set_bytes(work), STORE_BATCH_BYTES):
            piece = flat.have[first : first + STORE_BATCH_BYTES]
            moved = os.pwrite(file, piece.data, number * set_bytes(work) + first)
            _require(moved, piece.size)
        if work.verb == FLUSHED_PUT:
            os.fsync(file)

    async def get(self, work: Work) -> None:
        flat = self.flat(work)
        begin = flat.next() * set_bytes(work)
        for first in range(0, set_bytes(work), STORE_BATCH_BYTES):
            piece = flat.want[first : first + STORE_BATCH_BYTES]
            moved = os.preadv(self._file(work), [piece.data], begin + first)
            _require(moved, piece.size)

    async def get_one(self, work: Work, at: int) -> None:
        flat = self.flat(work)
        _, piece = flat.block(at)
        moved = os.preadv(self._file(work), [piece.data], flat.blocks[at])
        _require(moved, piece.size)

    def _path(self, work: Work) -> Path:
        return self._place / f"{work.nbytes}"

    def _file(self, work: Work) -> int:
        if work.nbytes not in self._files:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            file = self._files[work.nbytes] = os.open(self._path(work), flags, 0o600)
            self._opened.callback(os.close, file)
            # As the file of a disk tier, which has its room from the beginning.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, SETS * set_bytes(work))
        return self._files[work.nbytes]


class ObjectBlocks(FlatBlocks):
    """obstore alone: an object for each block, as many at once as a tier has."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        address = TierAddress.parse(f"object:file://{place}")
        self._store = bucket_of(address, STORE_TIMEOUT_S)

    async def put(self, work: Work) -> None:
        flat = self.flat(work)
        number, flat.number = flat.number, flat.number + 1

        async def put_block(at: int) -> None:
            have, _ = flat.block(at)
            await self._store.put_async(_object(work, number, at), have.data)

        await self._all(work, put_block)
        flat.sets = [*flat.sets, number][-2:]

    async def get(self, work: Work) -> None:
        number = self.flat(work).next()
        await self._all(work, lambda at: self._get(work, number, at))

    async def get_one(self, work: Work, at: int) -> None:
        await self._get(work, self.flat(work).number - 1, at)

    async def _get(self, work: Work, number: int, at: int) -> None:
        found = await self._store.get_async(_object(work, number, at))
        _, want = self.flat(work).block(at)
        want[:] = np.frombuffer(await found.bytes_async(), np.uint8)

    async def _all(self, work: Work, move: Callable[[int], Awaitable[None]]) -> None:
        numbers = iter(range(work.blocks))

        async def lane() -> None:
            for at in numbers:
                await move(at)

        await asyncio.gather(*(lane() for _ in range(STORE_OBJECT_REQUESTS)))


def _object(work: Work, number: int, at: int) -> str:
    return f"{work.nbytes}/{number}/{at}"


def _require(found: int, wanted: int, what: str = "bytes were moved") -> None:
    if found != wanted:
        raise RuntimeError(f"{found} of {wanted} {what}")


async def memory(line: Line, _: dict[str, Any]) -> None:
    await line.send({"facts": {"numpy": np.__version__}})
    await MemoryBlocks().rounds(line)


async def files(line: Line, options: dict[str, Any]) -> None:
    await line.send({"facts": {}})
    with ExitStack() as opened:
        await FileBlocks(Path(options["place"]), opened).rounds(line)


async def objects(line: Line, options: dict[str, Any]) -> None:
    await line.send({"facts": {"obstore": version("obstore")}})
    await ObjectBlocks(Path(options["place"])).rounds(line)
