"""What stands beside a store server: two processes that move the same blocks.

*Transfer* is kvwire without the store: the right cache's blocks into the left one's, or
the other way round. *Sockets* are bare ones, whose blocks lie side by side.
"""

from __future__ import annotations

import socket
from typing import Final

from kvwire.cli.bench.bare import connected, receive_into, stream
from kvwire.cli.bench.operations import BenchMemory, OpsRound, joined
from kvwire.cli.bench.side import Bench, Seconds, digest, each_timed, fill
from kvwire.cli.bench.store import (
    GET,
    HASH_BYTES,
    LOOKUPS,
    MATCHES,
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
    memory = BenchMemory(b)
    async with joined(b) as ends:
        async for work in b.works(StoreWork):
            memory.have(work.transfer)
            if b.checks:
                await memory.fill()
            moves, pool = OpsRound(b, ends, memory, work.transfer, ()), memory.pool
            assert pool is not None
            whole, seconds = pool.blocks, list[float]()
            each = [[block] for block in whole[: work.count]]
            async with b.clock():
                for pool.blocks in each if work.verb == ONE else [whole]:
                    seconds += await moves.move()
            pool.blocks = whole
            # One by one, not all of them travel.
            checks = b.checks and work.verb != ONE
            await b.report(seconds, await memory.digested(checks))
    memory.close()


async def sockets(b: Bench) -> None:
    """Move blocks over one connection, and questions of the size of a match."""
    with await connected(b) as sock:
        made: dict[tuple[int, int], list[memoryview]] = {}
        async for work in b.works(StoreWork):
            key = work.nbytes, work.set_blocks
            if key not in made:
                made[key] = [memoryview(bytearray(key[0])) for _ in range(key[1])]
            parts = made[key]
            if b.checks:
                await fill(parts[0])
            async with b.clock():
                if work.verb in (ONE, *MATCHES):
                    seconds = await asked(b, sock, work, parts)
                else:
                    # All of a set: one block again and again would stay in the cache.
                    to_left = work.verb == GET
                    seconds = await stream(b, sock, to_left, parts, parts)
            checks = b.checks and work.verb not in MATCHES
            await b.report(seconds, digest(parts[0]) if checks else "")


async def asked(
    b: Bench, sock: socket.socket, work: StoreWork, parts: list[memoryview]
) -> Seconds:
    """Ask for one block after the other, or for matches."""
    question, times = memoryview(bytearray(b"!")), work.count
    if work.verb in MATCHES:
        question, times = memoryview(bytearray(times * _ASKED_BYTES)), LOOKUPS
        parts = [memoryview(bytearray(work.count * _ANSWER_BYTES))]

    async def ask(number: int) -> None:
        sock.sendall(question)
        receive_into(sock, parts[number % len(parts)])

    if b.left:
        await b.receive()
        return await each_timed(times, ask)
    await b.send()
    for number in range(times):
        receive_into(sock, question)
        sock.sendall(parts[number % len(parts)])
    return ()
