"""An engine on some tiers in a process of its own, which does what it is told.

``python -m tests.programs.torture.engine OWNER TIER...`` reads orders from its input, a
line each, and answers each by a line. ``... OWNER storm CLIENTS TIER`` is many clients
of one server that put and get until they are killed.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys

import msgspec
import numpy as np

from kvwire import BlockStore
from tests.programs.model.kinds import Block, Cache, contents

# Each owner has other bytes under the same hashes, this far from another's.
OWNERS_APART = 1 << 12
KINDS = (0, 1, 3)
NUMBERS = 160


class Order(msgspec.Struct, array_like=True, frozen=True):
    """Blocks of one kind to put, get, delete or pin: a range of numbers."""

    verb: str
    kind: int
    first: int
    last: int

    @property
    def blocks(self) -> list[Block]:
        """The blocks."""
        return [Block(self.kind, number) for number in range(self.first, self.last)]


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """Which blocks landed, which of these are wrong, and why the others are missing.

    Of what moves no blocks, why it has failed.
    """

    landed: list[int]
    wrong: list[int]
    reasons: list[str]


def any_order(draw: random.Random, *, alone: bool = False) -> Order:
    """Draw what an engine may be asked; who is alone has nobody else's blocks."""
    verbs = ("put", "get", "get", *("delete", "pin", "unpin") * alone)
    first, verb = draw.randrange(NUMBERS), draw.choice(verbs)
    last = min(NUMBERS, first + draw.randint(1, 60))
    return Order(verb, draw.choice(KINDS), first, last)


async def obey(store: BlockStore, owner: int, order: Order) -> Answer:
    """Put or get some blocks as one of the owners."""
    numbers = np.arange(order.first, order.last, dtype=np.uint64)
    numbers += np.uint64(owner * OWNERS_APART)
    right = contents(order.kind, numbers)
    cache = Cache(order.kind, right.copy())
    hashes, ids = [block.hash for block in order.blocks], list(range(numbers.size))
    if order.verb in ("delete", "pin", "unpin"):
        try:
            await getattr(store, order.verb)(hashes, cache.paged)
        except OSError as exc:
            return Answer([], [], [str(exc)])
        return Answer([], [], [])
    if order.verb == "put":
        outcome = await store.put(hashes, cache.paged, ids)
    else:
        cache.rows[:] = 0
        outcome = await store.get(hashes, cache.paged, ids)
    landed = outcome.landed.ids()
    wrong = landed[(cache.rows[landed] != right[landed]).any(axis=1)]
    first = order.first
    return Answer(
        (landed + first).tolist(),
        (wrong + first).tolist(),
        list(outcome.missing.reasons),
    )


async def serve(owner: int, tiers: list[str]) -> None:
    """Do what comes, one order after the other."""
    async with BlockStore.open(["memory:256KiB?slab=64KiB", *tiers]) as store:
        print("open", flush=True)
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            order = msgspec.json.decode(line, type=Order)
            answer = await obey(store, owner, order)
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()


async def storm(owner: int, clients: int, tier: str) -> None:
    """Be many clients, and say so when each has done something."""

    async def one(number: int, *, forever: bool) -> None:
        draw = random.Random(number)
        for _ in itertools.count() if forever else range(1):
            answer = await obey(stores[number], owner, any_order(draw))
            if answer.wrong:
                print(f"wrong bytes: {answer.wrong}", flush=True)

    memory = "memory:64KiB?slab=16KiB"
    stores = [await BlockStore.open([memory, tier]) for _ in range(clients)]
    await asyncio.gather(*(one(number, forever=False) for number in range(clients)))
    print("open", flush=True)
    await asyncio.gather(*(one(number, forever=True) for number in range(clients)))


if __name__ == "__main__":
    if sys.argv[2] == "storm":
        asyncio.run(storm(int(sys.argv[1]), int(sys.argv[3]), sys.argv[4]))
    else:
        asyncio.run(serve(int(sys.argv[1]), sys.argv[2:]))
