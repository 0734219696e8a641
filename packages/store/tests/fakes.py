"""A tier that does what its test says, for what stands on top of tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from kvwire.kv.fragments import Fragments
from kvwire_store.keys import Keys, Orders
from kvwire_store.namespace import ABSENT, Namespace
from kvwire_store.tiers.base import Batch, BlockResult, BlockResults, Tier, TierStats


class FakeTier(Tier):
    """Keeps keys and no bytes.

    Attributes:
        orders: The order of each block that is there.
        written: The keys of each write, in their order.
        touched: The keys of each touch that named any.
        moving: The images that are being written.
        before: Awaited at the beginning of each write, to its end.
        refusing: Whether it takes no blocks.
        closing: Awaited at the end of a close.
        closes: How often it was closed.
    """

    def __init__(self, name: str = "fake", *, durable: bool = True) -> None:
        super().__init__(name)
        self.durable = durable
        self.orders: dict[bytes, int] = {}
        self.written: list[list[bytes]] = []
        self.touched: list[list[bytes]] = []
        self.moving: list[Fragments] = []
        self.before: Callable[[], Awaitable[object]] | None = None
        self.refusing = False
        self.closing: asyncio.Event | None = None
        self.closes = 0

    @property
    def taking(self) -> bool:
        return not self.refusing

    async def find(self, keys: Keys) -> Orders:
        found = [self.orders.get(key, ABSENT) for key in keys.tolist()]
        return np.array(found, np.uint8)

    async def _write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        self.moving.append(batch.images)
        try:
            if self.before is not None:
                await self.before()
        finally:
            self.moving.remove(batch.images)
        self.written.append(batch.keys.tolist())
        self.orders |= zip(batch.keys.tolist(), batch.orders.tolist(), strict=True)
        return np.full(batch.keys.size, BlockResult.LANDED, np.uint8)

    async def _read(self, namespace: Namespace, batch: Batch) -> BlockResults:
        """See Tier; it has no bytes to give."""
        return np.full(batch.keys.size, BlockResult.MISSING, np.uint8)

    def touch(self, keys: Keys) -> None:
        if keys.size:
            self.touched.append(keys.tolist())

    async def delete(self, keys: Keys) -> None:
        for key in keys.tolist():
            self.orders.pop(key, None)

    async def delete_namespace(self, digest: bytes) -> None:
        self.orders = {k: v for k, v in self.orders.items() if k[:16] != digest}

    def stats(self) -> TierStats:
        return TierStats(blocks=len(self.orders))

    async def close(self) -> None:
        self.closes += 1
        if self.closing is not None:
            await self.closing.wait()
