"""Random verbs, puts and gets of two clients at once, at a real server on a disk.

What a verb has reported is compared with what is there, and every byte that a get gives
with what was put. The model in tests/programs/model does so while disks fail and
processes die; this one has several calls under way at any time, and a network.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvwire import BlockStore, Placement, StoreServer
from kvwire.aio import gather_all
from kvwire.kv.blocks import Bits
from tests.store.server.test_server import where
from tests.support import inside
from tests.support.caches import Filled, chain
from tests.support.pairs import turns, until

CHAINS = [chain(12, f"{number}") for number in range(6)]
SOURCES = [Filled(seed=number) for number in range(6)]


class Both:
    """Two clients of one server, and the blocks that were acknowledged."""

    def __init__(
        self, seed: int, server: BlockStore, clients: Sequence[BlockStore], to: str
    ) -> None:
        self.draw = random.Random(seed)
        self.server = server
        self.clients = clients
        self.to = to
        # By everybody's store, and by the one that writes its blocks down later.
        self.acknowledged: set[bytes] = set()
        self.ahead: set[bytes] = set()
        self.told: dict[str, int] = {}

    async def act(self) -> None:
        """Do one thing at random, beside others."""
        number = self.draw.randrange(len(CHAINS))
        count = self.draw.randint(1, 12)
        hashes = CHAINS[number][:count]
        store = self.draw.choice((*self.clients, self.server))
        cache = SOURCES[number].cache
        verb = self.draw.choice(
            (
                *("put", "get", "put", "get", "locate", "prefetch", "demote"),
                *("pin", "unpin", "retain"),
            )
        )
        match verb:
            case "put":
                outcome = await store.put(hashes, cache, range(count))
                landed = outcome.landed.ids().tolist()
                later = store is self.clients[1]
                known = self.ahead if later else self.acknowledged
                known.update(hashes[at] for at in landed)
            case "get":
                await self._get(store, number, hashes)
            case "pin":
                told = await store.pin(hashes, cache, ttl_s=self.draw.choice((1, 60)))
                self._count(verb, told)
            case "retain":
                priority = self.draw.randint(0, 100)
                told = await store.retain(hashes, cache, priority=priority)
                self._count(verb, told)
            case "prefetch":
                tier = self.draw.choice(("memory", self.to))
                if store is self.server:
                    tier = "memory"
                told = await store.prefetch(hashes, cache, tier=tier)
                self._count(verb, told)
                assert not any(self._sure(store, hashes) & told.missing)
            case _:
                told = await getattr(store, verb)(hashes, cache)
                self._count(verb, told)

    async def give_up(self) -> None:
        """Cancel a verb after some turns of the loop; no block may be lost by it."""
        store = self.draw.choice((*self.clients, self.server))
        number = self.draw.randrange(len(CHAINS))
        verb = self.draw.choice((store.prefetch, store.demote, store.pin))
        doing = asyncio.ensure_future(verb(CHAINS[number], SOURCES[number].cache))
        await turns(self.draw.randrange(20))
        doing.cancel()
        await asyncio.wait((doing,))

    def _count(self, verb: str, told: Placement) -> None:
        self.told[verb] = self.told.get(verb, 0) + int(told.done.sum())

    def _sure(self, store: BlockStore, hashes: Sequence[bytes]) -> Bits:
        """Return which blocks have to be found through a store."""
        known = self.acknowledged
        if store is self.clients[1]:
            known = known | self.ahead
        return np.array([one in known for one in hashes])

    async def _get(
        self, store: BlockStore, number: int, hashes: Sequence[bytes]
    ) -> None:
        sure = self._sure(store, hashes)
        target = Filled()
        outcome = await store.get(hashes, target.cache, range(len(hashes)))
        landed = outcome.landed.ids().tolist()
        right = SOURCES[number].tokens(landed)
        assert (target.tokens(landed) == right).all(), "wrong bytes"
        lost = set(np.flatnonzero(sure).tolist()) - set(landed)
        assert not lost, f"acknowledged, and lost: {lost}: {outcome.missing.reasons}"

    async def settled(self) -> None:
        """Compare what verbs report with what is there, while nothing else runs."""
        for store in (self.server, *self.clients):
            tiers = inside.tiers(store)
            await tiers.memory.settle()
            # A server goes on with what its client has given up.
            await until(lambda: not tiers.memory.index.pinned)  # noqa: B023 - awaited
            await until(lambda: not tiers.moving_bytes.any())  # noqa: B023
        for hashes, source in zip(CHAINS, SOURCES, strict=True):
            cache = source.cache
            for store in (self.server, *self.clients):
                tiers = inside.tiers(store)
                (namespace,) = {
                    one.digest for one in inside.tiers(self.server).namespaces.values()
                }
                keys = np.array([namespace + one for one in hashes], np.object_)
                verb = self.draw.choice(("locate", "demote", "prefetch"))
                while True:
                    before = tiers.memory.index.find(keys) >= 0
                    told = await getattr(store, verb)(hashes, cache)
                    here = tiers.memory.index.find(keys) >= 0
                    below = await tiers.below[0].holds(keys)
                    # A call that was given up may reach the server only now.
                    if verb != "locate" or (before == here).all():
                        break
                right = {
                    "locate": here | below,
                    "demote": ~here & below,
                    "prefetch": here,
                }[verb]
                assert (told.done <= right).all(), (verb, told)
                if verb == "locate":
                    assert (told.done == right).all()
                    mine, *others = told.held.values()
                    assert (mine == here).all()
                    assert (np.logical_or.reduce(others) == below).all()
                assert not (self._sure(store, hashes) & told.missing).any(), (
                    verb,
                    told,
                )


SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6)]


@pytest.mark.parametrize("seed", [1, *SLOW])
async def test_what_was_reported_is_what_is_there(tmp_path: Path, seed: int) -> None:
    # Memory is too small for all blocks, and the disk is not.
    tiers = ["memory:128KiB", f"disk:{tmp_path}?size=1MiB"]
    async with (
        BlockStore.open(tiers) as store,
        StoreServer(store, "127.0.0.1:0") as server,
        BlockStore.open(["memory:128KiB", where(server)]) as one,
        BlockStore.open(["memory:128KiB", where(server)], write="back") as two,
    ):
        await store.put(CHAINS[0][:1], SOURCES[0].cache, [0])
        both = Both(seed, store, (one, two), where(server))
        for _ in range(10):
            acts = [both.act() for _ in range(20)]
            await gather_all(*acts, *(both.give_up() for _ in range(5)))
            await both.settled()
        assert set(both.told) == {
            *("locate", "prefetch", "demote", "pin", "unpin", "retain")
        }
        assert all(both.told.values())
