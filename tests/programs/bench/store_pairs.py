"""What stands beside a store server: two processes that move the same blocks.

*Transfer* is kvwire without the store: the right cache's blocks into the left one's, or
the other way round. *Sockets* are bare ones, whose blocks lie side by side.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Final

from kvwire.cli.bench.bare import connected, receive_into, stream
from kvwire.cli.bench.operations import Ends, Memory, Moves, joined
from kvwire.cli.bench.side import Bench, Seconds, digest, each_timed, fill
from kvwire.cli.bench.store import (
    GET,
    HASH_BYTES,
    LOOKUPS,
    MATCH,
    ONE,
    StoreWork,
)
from kvwire.store.namespace import DIGEST_BYTES

# What a store server is asked for each hash, and what it answers.
_ASKED_BYTES: Final = DIGEST_BYTES + HASH_BYTES
_ANSWER_BYTES: Final = 1


async def transfers(b: Bench) -> None:
    """Push a set where it is put, and pull it where it is got.

    One by one, the first blocks travel, each by itself.
    """
    memory = Memory(b)
    async with joined(b) as ends:
        async for work in b.works(StoreWork):
            memory.have(work.transfer)
            part = Transfers(b, ends, memory, work)
            await b.round(part.move, fill=memory.fill, digest=part.digest)
    memory.close()


@dataclass(frozen=True)
class Transfers:
    """Does one round."""

    b: Bench
    ends: Ends
    memory: Memory
    work: StoreWork

    async def move(self) -> Seconds:
        moves = Moves(self.b, self.ends, self.memory, self.work.transfer, ())
        pool = self.memory.pool
        assert pool is not None
        seconds: list[float] = []
        whole = pool.blocks
        each = [[block] for block in whole[: self.work.count]]
        for pool.blocks in each if self.work.verb == ONE else [whole]:
            if self.b.left:
                seconds += await moves.begun_here()
            else:
                await moves.begun_there()
        pool.blocks = whole
        return seconds

    def digest(self) -> str:
        # One by one, not all of them travel.
        return "" if self.work.verb == ONE else self.memory.digest(0)


async def sockets(b: Bench) -> None:
    """Move blocks over one connection, and questions of the size of a match."""
    with await connected(b) as sock:
        made: dict[tuple[int, int], list[memoryview]] = {}
        async for work in b.works(StoreWork):
            key = work.nbytes, work.set_blocks
            if key not in made:
                made[key] = [memoryview(bytearray(key[0])) for _ in range(key[1])]
            part = Questions(b, sock, work, made[key])
            await b.round(part.move, fill=part.fill, digest=part.digest)


@dataclass(frozen=True)
class Questions:
    """Does one round."""

    b: Bench
    sock: socket.socket
    work: StoreWork
    parts: list[memoryview]

    async def move(self) -> Seconds:
        work, parts = self.work, self.parts
        if work.verb not in (ONE, MATCH):
            # All of a set: one block again and again would stay in the cache.
            return await stream(self.b, self.sock, work.verb == GET, parts, parts)
        question, times = memoryview(bytearray(b"!")), work.count
        if work.verb == MATCH:
            question, times = memoryview(bytearray(times * _ASKED_BYTES)), LOOKUPS
            parts = [memoryview(bytearray(work.count * _ANSWER_BYTES))]

        async def ask(number: int) -> None:
            self.sock.sendall(question)
            receive_into(self.sock, parts[number % len(parts)])

        if self.b.left:
            await self.b.receive()
            return await each_timed(times, ask)
        await self.b.send()
        for number in range(times):
            receive_into(self.sock, question)
            self.sock.sendall(parts[number % len(parts)])
        return ()

    async def fill(self) -> None:
        await fill(self.parts[0])

    def digest(self) -> str:
        return "" if self.work.verb == MATCH else digest(self.parts[0])
