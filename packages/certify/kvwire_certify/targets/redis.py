"""Redis as a KV store, by redis-py's asyncio client: one key for each offer.

The variant is the server's address, ``redis:127.0.0.1:6379`` by default.
"""

from __future__ import annotations

import asyncio
import secrets

import redis
from redis.asyncio import Redis

from kvwire_certify.transport import End


class RedisEnd(End):
    """A client with a pool of connections."""

    version = f"redis-py {redis.__version__}"

    async def open(self, memory: memoryview) -> bytes:
        self.client = Redis.from_url(f"redis://{self.variant or '127.0.0.1:6379'}")
        await self.client.ping()
        return b""

    async def offer(self, data: memoryview) -> bytes:
        reference = b"certify-" + secrets.token_bytes(8)
        await self.client.set(reference, bytes(data), ex=600)
        return reference

    async def withdraw(self, reference: bytes) -> None:
        await self.client.delete(reference)

    async def get(
        self, reference: bytes, into: memoryview, timeout_s: float | None
    ) -> bool | bytes:
        async with asyncio.timeout(timeout_s):
            value = await self.client.get(reference)
        return isinstance(value, bytes) and value

    async def close(self) -> None:
        await self.client.aclose()


TARGET = RedisEnd
