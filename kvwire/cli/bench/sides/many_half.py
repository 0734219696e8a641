"""Many connections, many transfers: the left side pulls, the right one publishes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np

import kvwire
from kvwire.cli.bench.case import Work
from kvwire.cli.bench.many_work import (
    AT_ONCE,
    BESIDE,
    BLOCK_BYTES,
    LAYER_BYTES,
    LAYERS,
    ManyWork,
)
from kvwire.cli.bench.sides.half import HOST, Half, digest, over

GO: Final = 1
STOP: Final = 2
# 2 components x 16 tokens x 1 head of 2 bytes: what is left are its dims.
_TOKENS: Final = 16
_DIMS: Final = LAYER_BYTES // (2 * _TOKENS * 2)
# Published before they are pulled, so that nobody waits for the other side's loop.
_AHEAD: Final = 4


class ManyHalf(Half):
    """Some communicators on each side, every one connected to every other.

    Args:
        transport: Its name.
        endpoints: How many there are on each side.
    """

    work_type: ClassVar[type[Work]] = ManyWork

    def __init__(self, transport: str, endpoints: int) -> None:
        self._transport = transport
        self._endpoints = endpoints
        self._communicators: list[kvwire.Communicator] = []
        self._connections: list[kvwire.Connection] = []
        self._work: ManyWork | None = None
        # Whose blocks are which: those that are timed, then the others beside.
        self._shares: list[list[int]] = []
        self._memory = np.zeros(0, np.uint8)
        # Ids are never used twice.
        self._number = 0

    async def listen(self) -> dict[str, Any]:
        """See Half."""
        await self._open("right")
        addresses = [await c.listen(f"tcp://{HOST}:0") for c in self._communicators]
        return {"address": [str(address) for address in addresses]}

    async def accept(self) -> dict[str, Any]:
        """See Half; the first connection is known to both sides as the first."""
        for communicator in self._communicators:
            for _ in range(self._endpoints):
                self._connections.append(await communicator.accept())
        return {}

    async def connect(self, address: Any) -> dict[str, Any]:
        """See Half."""
        await self._open("left")
        for where in address:
            for communicator in self._communicators:
                connection = await communicator.connect(
                    where, transport=self._transport
                )
                self._connections.append(connection)
        return {
            "connections": len(self._connections),
            "transport": str(self._connections[0].transport_report),
        }

    async def prepare(self, work: Work) -> dict[str, Any]:
        """See Half."""
        await self._have(work, publishes=True)
        return {}

    async def use(self, work: Work, given: dict[str, Any]) -> dict[str, Any]:
        """See Half."""
        await self._have(work, publishes=False)
        return {}

    async def check_left(self, work: Work) -> dict[str, Any]:
        """See Half; of what is timed, since the others need not come to their end."""
        await self._have(work, publishes=False)
        await asyncio.to_thread(self._memory.fill, 0)
        await self._pull(work)
        return {"digest": await asyncio.to_thread(self._digest)}

    async def check_right(self, work: Work) -> dict[str, Any]:
        """See Half."""
        await self._have(work, publishes=True)
        sent = await asyncio.to_thread(self._fill)
        await self._publish(work)
        return {"digest": sent}

    async def drive(self, work: Work) -> dict[str, Any]:
        """Left: ``values`` are seconds of each transfer, in their order."""
        await self._have(work, publishes=False)
        return {"values": await self._pull(work)}

    async def serve(self, work: Work) -> dict[str, Any]:
        """See Half."""
        await self._have(work, publishes=True)
        await self._publish(work)
        return {}

    async def close(self) -> None:
        """See Half."""
        for communicator in self._communicators:
            communicator.abort()
            await communicator.close()

    async def _open(self, name: str) -> None:
        for number in range(self._endpoints):
            communicator = await kvwire.open(name=f"bench-{name}-{number}")
            self._communicators.append(communicator)

    def _fill(self) -> str:
        words = self._memory.view(np.uint64)
        words[:] = np.random.default_rng().integers(0, 2**63, words.size, np.uint64)
        return self._digest()

    def _digest(self) -> str:
        """Of the blocks that are timed, in their order."""
        assert self._work is not None
        own = np.concatenate(self._shares[: len(self._work.distinct)])
        layers = self._memory.reshape(LAYERS, -1, LAYER_BYTES)
        return digest(np.ascontiguousarray(layers[:, own]).data)

    async def _have(self, work: Work, *, publishes: bool) -> None:
        """The memory of a work as a cache, and who gets which blocks of it."""
        assert isinstance(work, ManyWork)
        if self._work != work:
            blocks, self._shares = work.shares(publishes=publishes)
            await self._have_memory(blocks * BLOCK_BYTES)
            spec = kvwire.KVSpec(
                layers=LAYERS,
                kv_heads=1,
                head_dim=_DIMS,
                block_tokens=_TOKENS,
                dtype="float16",
            )
            shape = (LAYERS, blocks, 2, _TOKENS, 1, _DIMS)
            tensors = list(self._memory.view(np.float16).reshape(shape))
            self._cache = kvwire.PagedCache(spec, tensors)
            self._work = work

    async def _have_memory(self, nbytes: int) -> None:
        """As much as that, of which no page is missing; never old and new at once.

        In a thread: a loop that stands still for long is a dead peer to others.
        """
        if self._memory.size != nbytes:
            vars(self).pop("_cache", None)
            self._memory = np.zeros(0, np.uint8)
            self._memory = await asyncio.to_thread(np.ones, nbytes, np.uint8)

    # --- left -------------------------------------------------------------------------

    async def _pull(self, work: Work) -> list[float]:
        assert isinstance(work, ManyWork)
        first, control = self._number, self._connections[0]
        self._number += 1
        await control.recv(GO)
        if work.verb == AT_ONCE:
            return await self._pull_all(first)
        own, *others = self._shares
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for index, blocks in enumerate(others):
                group.create_task(self._keep_pulling(first, index, blocks, stop))
            values = [
                await self._pull_one(f"{first}-{i}", own, work.priority)
                for i in range(work.count)
            ]
            stop.set()
            if others:
                await control.send(STOP, b"")
        return values

    async def _pull_all(self, first: int) -> list[float]:
        async def one(index: int, blocks: Sequence[int]) -> float:
            connection = self._connections[index % len(self._connections)]
            await over(connection.pull(f"{first}-{index}", self._cache, blocks))
            return time.perf_counter() - began

        began = time.perf_counter()
        return await asyncio.gather(*(one(i, b) for i, b in enumerate(self._shares)))

    async def _pull_one(self, id: str, blocks: Sequence[int], priority: int) -> float:
        began = time.perf_counter()
        pulled = self._connections[0].pull(id, self._cache, blocks, priority=priority)
        await over(pulled)
        return time.perf_counter() - began

    async def _keep_pulling(
        self, first: int, index: int, blocks: Sequence[int], stop: asyncio.Event
    ) -> None:
        """One after the other; the last is given up when it is not needed any more."""
        number = 0
        while not stop.is_set():
            id = f"{first}-other-{index}-{number}"
            incoming = self._connections[0].pull(id, self._cache, blocks)
            stopped = asyncio.ensure_future(stop.wait())
            ended = asyncio.ensure_future(incoming.drained())
            await asyncio.wait({stopped, ended}, return_when=asyncio.FIRST_COMPLETED)
            incoming.abort("the benchmark has what it needs")
            await ended
            stopped.cancel()
            number += 1

    # --- right ------------------------------------------------------------------------

    async def _publish(self, work: Work) -> None:
        assert isinstance(work, ManyWork)
        first, control = self._number, self._connections[0]
        self._number += 1
        if work.verb == AT_ONCE:
            published = [
                self._offer(self._communicator_of(i), f"{first}-{i}", blocks)
                for i, blocks in enumerate(self._shares)
            ]
            await control.send(GO, b"")
            await asyncio.gather(*map(over, published))
            return
        own, *others = self._shares
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._keep_publishing(first, index, blocks))
                for index, blocks in enumerate(others)
            ]
            await self._publish_in_order(work, first, own)
            if work.verb == BESIDE:
                await control.recv(STOP)
            for task in tasks:
                task.cancel()

    async def _publish_in_order(
        self, work: ManyWork, first: int, blocks: Sequence[int]
    ) -> None:
        communicator = self._communicators[0]
        ids = [f"{first}-{number}" for number in range(work.count)]
        ahead = [self._offer(communicator, id, blocks) for id in ids[:_AHEAD]]
        await self._connections[0].send(GO, b"")
        for id in ids[_AHEAD:]:
            await over(ahead.pop(0))
            ahead.append(self._offer(communicator, id, blocks))
        for outgoing in ahead:
            await over(outgoing)

    async def _keep_publishing(
        self, first: int, index: int, blocks: Sequence[int]
    ) -> None:
        number = 0
        while True:
            id = f"{first}-other-{index}-{number}"
            outgoing = self._offer(self._communicators[0], id, blocks)
            try:
                await outgoing.drained()
            except asyncio.CancelledError:
                outgoing.abort("the benchmark has what it needs")
                await outgoing.drained()
                raise
            number += 1

    def _offer(
        self, communicator: kvwire.Communicator, id: str, blocks: Sequence[int]
    ) -> kvwire.Outgoing:
        outgoing = communicator.publish(id, self._cache, blocks)
        outgoing.ready()
        outgoing.finish()
        return outgoing

    def _communicator_of(self, index: int) -> kvwire.Communicator:
        """Whose connection number ``index`` is: each has as many as there are peers."""
        number = index % len(self._connections) // self._endpoints
        return self._communicators[number]
