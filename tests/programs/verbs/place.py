"""Two store servers and three stores that are their clients, and what fails there.

All are in one process, on a loop in virtual time: frames are lost, late, doubled and
changed, links end, disks fail, servers are closed and opened again. What a thread does
takes a drawn time, so calls overlap as they do in real time. A seed always gives the
same course of events.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import mock

import kvwire
from kvwire import BlockStore, StoreServer
from kvwire.aio import run_to_completion
from kvwire.directory import Record, Selector
from kvwire.kv.blocks import Bits
from kvwire.store.address import TierAddress
from kvwire.store.index import Index
from kvwire.store.keys import Keys
from kvwire.store.server.server import served_by
from kvwire.store.threads import Threads
from kvwire.store.tiers.disk import DiskTier
from kvwire.store.tiers.remote import RemoteTier, client_config
from kvwire.store.tiers.sharded import ShardedTier
from kvwire.testing.faults import FaultPlan
from tests.directory.memory import Hub, MemoryDirectory
from tests.programs.model.faults import POINTS, PointedFile
from tests.store.files import store_on
from tests.support import inside
from tests.support.virtual_time import pass_time

T = TypeVar("T")

NODES: Final = ("a", "b")
_MEMORY: Final = "memory:128KiB"
_DISK: Final = "size=1MiB&slab=64KiB"
# Of a client's calls; a link without answers is given up after it.
_TIMEOUT_S: Final = 2.0
# What a server still does for a client that is gone is over by then.
_QUIET_S: Final = 300.0


def bad_network(draw: random.Random) -> FaultPlan:
    """A plan of faults that a connection survives for some hundred frames."""
    names = ("drop", "delay", "reorder", "duplicate", "corrupt", "kill")
    chances: dict[str, Any] = {
        name: draw.choice((0.0, 0.0, 0.002, 0.01)) for name in names
    }
    return FaultPlan(seed=draw.randrange(2**32), **chances, spare=40, kill_after=40)


@contextmanager
def late_threads(draw: random.Random) -> Iterator[None]:
    """Let what threads do happen on the loop, after a drawn time."""

    async def run(self: Threads, function: Callable[[], T]) -> T:
        async def late() -> T:
            await pass_time(draw.random() * 0.005)
            return function()

        return await run_to_completion(late())

    with mock.patch.object(Threads, "run", run):
        yield


class Clock:
    """The time of all indexes, which goes on as that of the loop does."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        # Of a real time that has not come: what lasts longer is restored from a disk.
        self._ahead_s = time.time() - loop.time()
        self._loop = loop

    def __call__(self) -> float:
        """The time, in seconds since 1970."""
        return self._loop.time() + self._ahead_s


class Node:
    """A store server with memory and a disk.

    Attributes:
        name: Its name among the nodes.
        where: Its address.
        store: Its store, if it is open.
    """

    store: BlockStore

    def __init__(self, name: str, folder: Path, clock: Clock) -> None:
        self.name = name
        self.where = f"inproc://verbs-{name}-{id(self):x}"
        self._disk = TierAddress.parse(f"disk:{folder / name}?{_DISK}")
        self._clock = clock
        self._server: StoreServer | None = None

    async def open(self) -> None:
        """Open its store and serve it."""
        tier = await DiskTier.open(self._disk, file_type=PointedFile)
        self.store = store_on(tier, memory=_MEMORY)
        for index in self.indexes():
            index.now = self._clock
        server = StoreServer(
            self.store, self.where, name=self.name, one_sided_windows="off"
        )
        self._server = await server.__aenter__()

    async def close(self) -> None:
        """Close both in order."""
        if self._server is not None:
            self._server = None
            await self.store.close()

    @property
    def is_open(self) -> bool:
        """Whether it is served."""
        return self._server is not None

    def indexes(self) -> tuple[Index, Index]:
        """The indexes of its memory and of its disk."""
        tiers = inside.tiers(self.store)
        (disk,) = tiers.below
        assert isinstance(disk, DiskTier)
        return tiers.memory.index, disk._index

    def has(self, keys: Keys) -> Bits:
        """Which blocks are here."""
        memory, disk = self.indexes()
        here: Bits = (memory.find(keys) >= 0) | (disk.find(keys) >= 0)
        return here

    @property
    def is_quiet(self) -> bool:
        """Whether it does nothing for anybody."""
        if self._server is None:
            return True
        sessions = served_by(self._server).clients
        return not any(one.row().requests for one in sessions) and still(self.store)


def still(store: BlockStore) -> bool:
    """Whether nothing of a store is pinned or moved by a call."""
    tiers = inside.tiers(store)
    return not tiers.memory.index.pinned and not tiers.moving_bytes.any()


class Place:
    """The servers, and the stores through which acts go.

    Attributes:
        nodes: The servers, by name.
        one: A store below which there is the first server.
        two: The same, which writes its blocks down later.
        many: A store of which each block lies at one of the servers.
    """

    one: BlockStore
    two: BlockStore
    many: BlockStore

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.nodes = {name: Node(name, folder, self.clock) for name in NODES}
        self._hub = Hub()
        self._directory = MemoryDirectory(self._hub)
        self._remote: list[RemoteTier] = []

    async def open(self) -> None:
        """Open everything, while no frame is lost."""
        for number, node in enumerate(self.nodes.values()):
            await node.open()
            record = Record(
                name=node.name,
                address=node.where,
                incarnation=f"{number:032x}",
                role="store",
                labels={"node": node.name},
            )
            await self._directory.announce(record)
        self.one = await self._client("one", "through")
        self.two = await self._client("two", "back")
        communicator = await self._communicator("many")
        selector = Selector.parse("role=store")
        directory = MemoryDirectory(self._hub)
        sharded = ShardedTier("many", communicator, directory, selector, _TIMEOUT_S)
        await sharded._begin()
        self.many = store_on(sharded, memory=_MEMORY)
        for store in self.clients:
            inside.tiers(store).memory.index.now = self.clock

    @property
    def clients(self) -> tuple[BlockStore, ...]:
        """All stores that are clients of servers."""
        return self.one, self.two, self.many

    @property
    def stores(self) -> tuple[BlockStore, ...]:
        """All stores that are open."""
        return (*self.clients, *(node.store for node in self.nodes.values()))

    def below(self, store: BlockStore) -> list[Node]:
        """The servers of which a store is a client."""
        if store is self.many:
            return [*self.nodes.values()]
        return [self.nodes["a"]] if store in self.clients else []

    def linked(self, store: BlockStore) -> Sequence[str]:
        """The servers among which a store with many looks for a block now."""
        if store is not self.many:
            return NODES
        (tier,) = inside.tiers(store).below
        return [*tier.nodes()]

    def links(self, store: BlockStore) -> list[object]:
        """The connections of a store to its servers; None for one that it lacks."""
        if store not in self.clients:
            return []
        tiers = [*inside.tiers(store).below]
        if isinstance(tiers[0], ShardedTier):
            tiers = [node.tier for node in tiers[0]._nodes.values()]
        return [one._client.active for one in tiers if isinstance(one, RemoteTier)]

    def cut(self, draw: random.Random) -> None:
        """End one client's connection."""
        active = draw.choice(self._remote)._client.active
        if active is not None:
            active.connection.abort("cut")

    async def restart(self, name: str) -> None:
        """Close a server and open it again, on the same disk."""
        await self.nodes[name].close()
        POINTS.disarm()
        await self.nodes[name].open()

    async def quiet(self) -> None:
        """Wait until nobody does anything any more."""
        async with asyncio.timeout(_QUIET_S):
            for _ in range(2):
                # What is late arrives meanwhile.
                await pass_time(0.1)
                for store in self.stores:
                    await inside.tiers(store).memory.settle()
                while not all(node.is_quiet for node in self.nodes.values()):
                    await pass_time(0.1)
                while not all(map(still, self.clients)):
                    await pass_time(0.1)

    async def close(self) -> None:
        """Close everything."""
        POINTS.disarm()
        for store in self.clients:
            await store.close()
        for node in self.nodes.values():
            await node.close()
        await self._directory.close()

    async def _client(self, name: str, write: str) -> BlockStore:
        communicator = await self._communicator(name)
        tier = RemoteTier(name, communicator, self.nodes["a"].where, _TIMEOUT_S)
        await tier.dial()
        self._remote.append(tier)
        return store_on(tier, memory=_MEMORY, write=write)

    @staticmethod
    async def _communicator(name: str) -> kvwire.Communicator:
        config = client_config(TierAddress.parse("kvwire://here"))
        return await kvwire.open(config.replace(name=name))
