"""An owner of a window in a process of its own, and a reader of it here.

The owner's lane exposes two tensors of blocks with their generations. While it churns,
it takes blocks back at random, writes to them, and offers them again. Each word of a
block is the generation under which it is offered, plus a number for the word's place.
The generation also stands on a *board* that the reader maps. So whoever has a ticket
knows all words of its block: one of another life, block or place is a different one.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvwire.backend import registry
from kvwire.backend.lane import Lane, LaneContext
from kvwire.backend.window import BlockRead, WindowMemory, WindowReader
from kvwire.kv.blocks import Bits
from kvwire.limits import KIB
from kvwire.memory.arena import Arena
from kvwire.memory.generations import Generations
from kvwire.types import Role
from tests.backends.recorders import LaneRecorder
from tests.support.runs import Beside, beside

BLOCKS = 64
BLOCK_BYTES = 16 * KIB
TENSORS = 2
_WORDS = BLOCK_BYTES // 8
# Blocks that the owner changes before its loop may do something else.
_CHANGES = 50

Words = npt.NDArray[np.uint64]


# What each word of a block is, beside its generation.
_NUMBERS: list[Words] = [
    np.arange(_WORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 + 2 * tensor)
    for tensor in range(TENSORS)
]


def _tensors(arena: Arena | None = None) -> list[Words]:
    shape = (BLOCKS, _WORDS)
    make = np.zeros if arena is None else arena.numpy
    return [make(shape, np.uint64) for _ in range(TENSORS)]


def address(array: Words) -> int:
    """Where an array begins."""
    return int(array.__array_interface__["data"][0])


class Seen(NamedTuple):
    """What became of many blocks: those that landed wrong are torn or stale."""

    landed: int
    missing: int
    wrong: int


class Owner(Beside):
    """The reader's side: the lane to an owner, and a reader of its window."""

    lane: Lane
    handler: LaneRecorder
    memory: WindowMemory
    description: bytes
    window: WindowReader
    board: Words

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(process)
        self.mine = _tensors()

    def batch(
        self,
        blocks: list[int],
        tickets: Words | None = None,
        into: list[int] | None = None,
    ) -> BlockRead:
        """Blocks of the owner, to the same places here or to others."""
        ids = np.array(blocks, np.uint64)
        places = ids if into is None else np.array(into, np.uint64)
        nbytes = np.uint64(BLOCK_BYTES)
        return BlockRead(
            pieces_from=np.array([start for start, _ in self.memory.spans], np.uint64),
            pieces_to=np.array([address(one) for one in self.mine], np.uint64),
            run=BLOCK_BYTES,
            offsets_from=ids * nbytes,
            offsets_to=places * nbytes,
            entries=ids,
            generations=self.board[ids] if tickets is None else tickets,
            per_block=1,
            owner=self.mine,
        )

    async def read(self, batch: BlockRead) -> Bits:
        """Read a batch in either way."""
        found = self.window.read(batch)
        return await found if isinstance(found, asyncio.Future) else found

    async def read_all(self, times: int) -> list[Bits | BaseException]:
        """Begin to read everything so many times at once; how that ends."""
        batches = [self.batch(list(range(BLOCKS))) for _ in range(times)]
        reads = [self.read(batch) for batch in batches]
        return await asyncio.gather(*reads, return_exceptions=True)

    def wrong(self, batch: BlockRead) -> Bits:
        """Which blocks of a batch have a word here that is not their ticket."""
        places = batch.offsets_to // np.uint64(BLOCK_BYTES)
        tickets = batch.generations[:, None]
        bad: Bits = np.zeros(len(places), np.bool_)
        for one, numbers in zip(self.mine, _NUMBERS, strict=True):
            bad |= (one[places] - numbers != tickets).any(axis=1)
        return bad

    async def watch(self, blocks: int, *, believing: bool = False) -> Seen:
        """Read so many blocks and look at each; by a reader that believes everything.

        Such a reader stops at the first that is wrong.
        """
        rng = np.random.default_rng(blocks)
        landed = missing = wrong = 0
        while landed + missing < blocks and not (believing and wrong):
            ids = rng.permutation(BLOCKS)[: rng.integers(1, BLOCKS)].tolist()
            # Read before the bytes, as a ticket is that came over a wire.
            batch = self.batch(ids, self.board.copy()[ids])
            here = await self.read(batch)
            if believing:
                here = np.ones_like(here)
            wrong += int((here & self.wrong(batch)).sum())
            landed += int(here.sum())
            missing += int((~here).sum())
        return Seen(landed, missing, wrong)


@asynccontextmanager
async def owner(
    scheme: str, settings: Mapping[str, str], tmp_path: Path, *, in_arena: bool = False
) -> AsyncIterator[Owner]:
    """Start an owner, and open its window; its tensors lie in an arena or not."""
    path = tmp_path / "board"
    path.write_bytes(bytes(8 * BLOCKS))
    backend = registry.load(scheme)()
    lane = backend.open_lane(_context(Role.CLIENT, secret := _secret(), settings))
    where = "arena" if in_arena else "memory"
    arguments = (scheme, json.dumps(settings), secret.hex(), str(path), where)
    async with beside("-m", __name__, *arguments, kind=Owner, reads=True) as made:
        made.lane = lane
        made.handler = LaneRecorder()
        # The child answers only when its side is up.
        theirs = await made.do(lane.bootstrap.hex())
        await lane.join(bytes.fromhex(theirs), made.handler)
        said = json.loads(await made.do("expose"))
        made.memory = WindowMemory(
            spans=tuple(map(tuple, said["spans"])), table=tuple(said["table"])
        )
        made.description = bytes.fromhex(said["description"])
        made.board = np.memmap(path, np.uint64, "r")
        made.window = lane.window(made.description, made.memory)
        await made.window.ready()
        try:
            yield made
        finally:
            made.board = np.empty(0, np.uint64)  # which closes the file
            made.window.close()
            lane.abort()
            await backend.aclose()


def _secret() -> bytes:
    return secrets.token_bytes(32)


def _context(role: Role, secret: bytes, settings: Mapping[str, str]) -> LaneContext:
    return LaneContext(
        role=role, number=1, secret=secret, settings=settings, windows="peers"
    )


async def _main(
    scheme: str, settings: dict[str, str], secret: str, path: str, where: str
) -> None:
    backend = registry.load(scheme)()
    lane = backend.open_lane(_context(Role.SERVER, bytes.fromhex(secret), settings))
    lines = _Lines()
    await lane.join(bytes.fromhex(await lines.next()), LaneRecorder())
    print(lane.bootstrap.hex(), flush=True)
    arena = Arena(TENSORS * BLOCKS * (BLOCK_BYTES + 64)) if where == "arena" else None
    tensors = _tensors(arena)
    generations = Generations(BLOCKS)
    board = np.memmap(path, np.uint64, "r+")
    memory = WindowMemory(
        spans=tuple((address(one), one.nbytes) for one in tensors),
        table=(generations.address, generations.nbytes),
    )
    everything = list(range(BLOCKS))
    _fill(tensors, generations, board, everything)
    churning: asyncio.Task[None] | None = None
    while (line := await lines.next()) != "exit":
        answer: Any = {}
        if line == "expose":
            answer = {
                "description": lane.expose(memory).hex(),
                "spans": memory.spans,
                "table": memory.table,
            }
        elif line == "conceal":
            lane.conceal(memory)
        elif line == "withdraw":
            generations.renew(np.arange(BLOCKS))
        elif line == "churn":
            churning = asyncio.create_task(_churn(tensors, generations, board))
        elif line == "rest":
            assert churning is not None
            churning.cancel()
        print(json.dumps(answer), flush=True)


def _fill(
    tensors: list[Words], generations: Generations, board: Words, ids: list[int]
) -> None:
    """Write to blocks that were withdrawn, and offer them."""
    for one, ticket in zip(ids, generations.current(np.array(ids)), strict=True):
        for tensor, numbers in zip(tensors, _NUMBERS, strict=True):
            np.add(numbers, ticket, out=tensor[one])
        board[one] = ticket


async def _churn(tensors: list[Words], generations: Generations, board: Words) -> None:
    rng = np.random.default_rng(1)
    while True:
        for _ in range(_CHANGES):
            ids = rng.integers(0, BLOCKS, 1)
            generations.renew(ids)
            _fill(tensors, generations, board, ids.tolist())
        await asyncio.sleep(0)


class _Lines:
    """The lines of standard input."""

    def __init__(self) -> None:
        self._reader: asyncio.StreamReader | None = None

    async def next(self) -> str:
        """The next line; "exit" at the end."""
        if self._reader is None:
            self._reader = asyncio.StreamReader()
            protocol = asyncio.StreamReaderProtocol(self._reader)
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: protocol, sys.stdin)
        line = await self._reader.readline()
        return line.decode().strip() or "exit"


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:]))
