"""A soak of KV transfers, pulled and pushed, in which every byte is checked.

A producer and a consumer move blocks, with prefill in one piece and in chunks, aborts
and partial commits. Each word of the producer's blocks is of
:mod:`kvwire_certify.oracle`, and names its transfer, layer, position and place; a byte
that is misplaced, mixed or stale differs. A block of the consumer is poisoned when its
transfer has drained, and the poison has to be there still when the block is used again:
a late write shows, whenever it comes. A producer that reports a whole transfer of which
its consumer has a part has made a *false report*.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import kvwire
from tests.programs.soak.processes import say
from tests.support.caches import StampedCache

WAYS: Final = ("tcp", "local", "ucx", "nixl")
LISTENING: Final = ("producer",)
REACHED: Final = ("bytes",)
SPEC: Final = kvwire.KVSpec(
    layers=8, kv_heads=8, head_dim=128, block_tokens=16, dtype="float16"
)
NUM_BLOCKS: Final = 96
TRANSFERS_AT_ONCE: Final = 4
BLOCKS_EACH_MAX: Final = NUM_BLOCKS // TRANSFERS_AT_ONCE
# Chunks of one prefill.
CHUNKS_MAX: Final = 3
ASK_TAG: Final = 1
CLAIM_TAG: Final = 2
LEASE_S: Final = 1.5
DEADLINE_S: Final = 8.0
RETRY_S: Final = 0.05
# Numbers of transfers are not used again by a successor.
NUMBERS_EACH: Final = 2**16


def roles(way: str) -> tuple[str, ...]:
    """The processes, in the order in which they are started."""
    return ("producer", "consumer")


def prepare(folder: Path) -> None:
    """Nothing lies in files but the key, if there is one."""


def options(way: str) -> dict[str, Any]:
    """The configuration of each process."""
    return {"lease_s": LEASE_S}


async def live(
    role: str,
    comm: kvwire.Communicator,
    address: str,
    way: str,
    seed: int,
    stop: asyncio.Event,
    folder: Path,
) -> None:
    """Play a role until ``stop`` is set.

    Cancel safety: safe, but what is under way is not checked.
    """
    if role == "consumer":
        await Consumer(comm, way, seed).run(address, stop)
        return
    serving = asyncio.create_task(Producer(comm, seed).run())
    await stop.wait()
    serving.cancel()
    await asyncio.wait([serving])


class Ask(NamedTuple):
    """What a consumer wants from the producer."""

    number: int
    blocks: int
    push: bool


class Claim(NamedTuple):
    """What the producer says of a transfer that is over."""

    number: int
    complete: bool


class _Side:
    """What both sides have: a cache whose blocks are taken and given back."""

    def __init__(self, comm: kvwire.Communicator, seed: int) -> None:
        self._comm = comm
        self._random = random.Random(seed)
        self._stamped = StampedCache(SPEC, NUM_BLOCKS)
        self._free = list(range(NUM_BLOCKS))

    def _take(self, count: int) -> list[int]:
        """Take some of the free blocks, whichever."""
        self._random.shuffle(self._free)
        taken, self._free[:] = self._free[:count], self._free[count:]
        return taken

    def _give_back(self, blocks: list[int]) -> None:
        """Nobody touches these: whoever reads them from here on reads poison."""
        self._stamped.poison(blocks)
        self._free += blocks


class Producer(_Side):
    """Answers what consumers ask for."""

    def __init__(self, comm: kvwire.Communicator, seed: int) -> None:
        super().__init__(comm, seed)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until the communicator is closed.

        Cancel safety: safe, what was begun goes on.
        """
        async for connection in self._comm.connections():
            self._start(self._serve(connection))

    async def _serve(self, connection: kvwire.Connection) -> None:
        with contextlib.suppress(kvwire.ConnectionClosed):
            while True:
                ask = Ask(*json.loads(await connection.recv(ASK_TAG)))
                if ask.blocks <= len(self._free):
                    source = self._take(ask.blocks)
                    self._start(self._produce(connection, ask, source))

    async def _produce(
        self, connection: kvwire.Connection, ask: Ask, source: list[int]
    ) -> None:
        try:
            verb = connection.push if ask.push else self._comm.publish
            out = verb(ask.number, self._stamped.cache, source, deadline=DEADLINE_S)
        except kvwire.ConnectionClosed:
            self._free += source
            return
        await self._prefill(out, ask.number, source)
        outcome = await out
        await out.drained()
        self._give_back(source)
        claim = json.dumps(Claim(ask.number, outcome.complete)).encode()
        for other in self._comm.live_connections:
            if other.peer.origin == connection.peer.origin:
                with contextlib.suppress(kvwire.KVWireError):
                    await other.send(CLAIM_TAG, claim)

    async def _prefill(
        self, out: kvwire.Outgoing, number: int, blocks: list[int]
    ) -> None:
        """Write and mark a transfer by chunks and layers.

        Now and then give up half-way, or leave the last layer of a chunk out.
        """
        fate, parts = self._random.random(), chunks(len(blocks), self._random)
        say({"in several chunks": int(len(parts) > 1)})
        for positions in parts:
            for layer in range(SPEC.layers):
                for position in positions:
                    self._stamped.write(blocks[position], number, position, layer)
                if fate < 0.05 and layer == SPEC.layers // 2:
                    out.abort("soak: aborted half-way")
                    return
                if fate < 0.1 and layer == SPEC.layers - 1:
                    out.finish(partial=True)
                    return
                out.ready(layers=layer, blocks=slice(positions.start, positions.stop))
                await asyncio.sleep(0)
        out.finish()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Consumer(_Side):
    """Asks for transfers and checks what comes."""

    def __init__(self, comm: kvwire.Communicator, way: str, seed: int) -> None:
        super().__init__(comm, seed)
        self._transport = way
        self._number = seed * NUMBERS_EACH
        # Of each transfer that is over on one side: whether it was complete there.
        self._outcomes: dict[int, bool] = {}
        self._claims: dict[int, bool] = {}

    async def run(self, address: str, stop: asyncio.Event) -> None:
        """Move blocks until told to stop, then look at all memory once more.

        Cancel safety: safe, but what is under way is not checked.
        """
        while not stop.is_set():
            connection = await self._connected(address, stop)
            if connection is None:
                break
            claims = asyncio.create_task(self._hear(connection))
            async with asyncio.TaskGroup() as group:
                for _ in range(TRANSFERS_AT_ONCE):
                    group.create_task(self._transfers(connection, stop))
            claims.cancel()
            await asyncio.wait([claims])
        say({"late": self._stamped.late(self._free)})

    async def _connected(
        self, address: str, stop: asyncio.Event
    ) -> kvwire.Connection | None:
        while not stop.is_set():
            try:
                found = await self._comm.connect(address, transport=self._transport)
            except (kvwire.KVWireError, OSError):
                await asyncio.sleep(RETRY_S)
                continue
            taken = next(str(each) for each in found.transport_report if each.taken)
            say({f"connections, {taken}": 1})
            return found
        return None

    async def _transfers(
        self, connection: kvwire.Connection, stop: asyncio.Event
    ) -> None:
        while not (connection.closed or stop.is_set()):
            with contextlib.suppress(kvwire.ConnectionClosed):
                await self._transfer(connection)

    async def _transfer(self, connection: kvwire.Connection) -> None:
        self._number += 1
        blocks, push = self._random.randint(1, BLOCKS_EACH_MAX), self._random.random()
        ask = Ask(self._number, blocks, push < 0.5)
        target = self._take(ask.blocks)
        late = self._stamped.late(target)
        try:
            verb = self._comm.expect if ask.push else connection.pull
            inc = verb(ask.number, self._stamped.cache, target, deadline=DEADLINE_S)
        except kvwire.ConnectionClosed:
            self._free += target
            raise
        try:
            await connection.send(ASK_TAG, json.dumps(ask).encode())
        except kvwire.ConnectionClosed:
            inc.abort("soak: not asked for")
        outcome = await inc
        nbytes, wrong = compared(self._stamped, ask.number, target, outcome)
        await inc.drained()
        self._give_back(target)
        self._outcomes[ask.number] = outcome.complete
        word = "complete" if outcome.complete else "partial"
        say({"bytes": nbytes, "wrong": wrong, "late": late, word: 1})
        self._compare(ask.number)

    async def _hear(self, connection: kvwire.Connection) -> None:
        with contextlib.suppress(kvwire.ConnectionClosed):
            while True:
                claim = Claim(*json.loads(await connection.recv(CLAIM_TAG)))
                self._claims[claim.number] = claim.complete
                self._compare(claim.number)

    def _compare(self, number: int) -> None:
        if number in self._claims and number in self._outcomes:
            claims, landed = self._claims.pop(number), self._outcomes.pop(number)
            say({"false": int(claims and not landed), "compared": 1})


def compared(
    cache: StampedCache, life: int, blocks: list[int], outcome: kvwire.Outcome
) -> tuple[int, int]:
    """The bytes of blocks that have landed, and those of them that are wrong."""
    landed = set(outcome.landed.ids().tolist())
    places = [place for place, block in enumerate(blocks) if block in landed]
    wrong = sum(cache.wrong(blocks[place], life, place) for place in places)
    return len(places) * cache.words[:, 0].nbytes, wrong


def chunks(count: int, source: random.Random) -> list[range]:
    """Cut the positions of a list, as a prefill may take them."""
    most = min(count - 1, source.randrange(CHUNKS_MAX))
    cuts = sorted(source.sample(range(1, count), most))
    return [range(start, stop) for start, stop in pairwise([0, *cuts, count])]
