"""A service of values that is played here: a dictionary that can be away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from kvwire.kv.blocks import Bits
from kvwire_store.spi import (
    HEAD_BYTES,
    Batch,
    BlockResult,
    BlockResults,
    Head,
    Key,
    Keys,
    KeyValueTier,
    TierAddress,
    packed,
)


class Played:
    """The service, which any number of tiers use.

    Attributes:
        values: What is there, by the keys.
        asked: The keys of which somebody wanted the head.
        raising: What it raises when it is asked whether it is back.
        down: Whether it is away.
        heads: Whether it gives heads alone.
    """

    def __init__(self, *, heads: bool = True) -> None:
        self.values: dict[Key, bytes] = {}
        self.asked: list[Key] = []
        self.raising: list[Exception] = []
        self.down = False
        self.heads = heads

    async def open(self, kind: type[PlayedTier] | None = None) -> PlayedTier:
        tier = (kind or PlayedTier)(TierAddress.parse("played:"))
        tier.service = self
        try:
            await tier.connect()
        except OSError as exc:
            tier.lost(exc)
        return tier

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        self.down = True
        try:
            yield
        finally:
            self.down = False

    def damage(self, key: bytes, image: bytes) -> None:
        self.values[key] = self.values[key][:-1] + bytes([image[-1] ^ 1])


class PlayedTier(KeyValueTier):
    service: Played
    durable = True
    asks = True

    @property
    def taking(self) -> bool:
        return not self.reason

    async def connect(self) -> None:
        if self.service.down:
            raise OSError("it is away")
        if self.service.raising:
            raise self.service.raising.pop(0)

    async def _answers(self) -> bool:
        await asyncio.sleep(0)
        if self.service.down and not self.reason:
            self.lost(OSError("it is away"))
        return not self.reason

    async def heads(self, keys: Keys) -> list[Head]:
        self.service.asked += keys.tolist()
        if not await self._answers():
            return [BlockResult.FAILED] * keys.size
        heads: list[Head] = []
        for value in map(self.service.values.get, keys.tolist()):
            if value is None:
                heads.append(BlockResult.MISSING)
            else:
                head = value[:HEAD_BYTES]
                heads.append(head if self.service.heads else BlockResult.LANDED)
        await asyncio.sleep(0)  # an answer takes a while, and is older than it then
        return heads

    async def put(self, batch: Batch) -> BlockResults:
        if not await self._answers():
            return np.full(batch.keys.size, BlockResult.FAILED, np.uint8)
        for key, value in zip(batch.keys.tolist(), packed(batch), strict=True):
            self.service.values[key] = value.tobytes()
        return np.full(batch.keys.size, BlockResult.LANDED, np.uint8)

    async def get_into(self, batch: Batch) -> BlockResults:
        if not await self._answers():
            return np.full(batch.keys.size, BlockResult.FAILED, np.uint8)
        results = np.full(batch.keys.size, BlockResult.MISSING, np.uint8)
        values, keys = self.service.values, batch.keys.tolist()
        there = [at for at, key in enumerate(keys) if key in values]
        raws = [memoryview(values[keys[at]]) for at in there]
        await self.unpack(batch, np.array(there, np.int64), raws, results)
        return results

    async def remove(self, keys: Keys) -> Bits:
        gone = await self._answers()
        for key in keys.tolist() if gone else ():
            self.service.values.pop(key, None)
        return np.full(keys.size, gone, np.bool_)

    async def remove_folder(self, folder: str) -> None:
        if not await self._answers():
            raise OSError(self.reason)
        values = self.service.values
        for key in [key for key in values if self.value_name(key).startswith(folder)]:
            del values[key]


class Remembering(PlayedTier):
    remembers = True
    asks = False
