"""Redis or Valkey as a directory: a key a member, with a TTL, and a channel.

Each write sets the key and says the same on the channel, in one transaction; a watcher
subscribes first and reads the keys afterwards, so that it misses nothing in between.
Only plain commands are used: no keyspace notifications, which a server has to be
configured for. A server that was restarted with nothing in it is full again after a
third of a lease.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Any, ClassVar, Final
from urllib.parse import urlencode

from kvwire.directory.base import Batch, Directory
from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire.limits import MEMBERS_MAX

with needed_by("a directory in Redis", extra="redis"):
    from redis.asyncio import Redis
    from redis.asyncio.client import PubSub
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError

# A server that is silent for so long is asked whether it is there, and given as long
# again. Renewals of others are signs of life as well.
_SILENCE_S: Final = 5.0
_CONNECT_S: Final = 5.0
# Keys that one command asks for.
_PAGE: Final = 256


class RedisDirectory(Directory):
    """Keeps records on a server: ``redis://``, ``rediss://`` (TLS) or ``valkey://``."""

    # Fleets that share a server have different prefixes.
    options: ClassVar[Mapping[str, str]] = {"prefix": "kvwire"}

    def __init__(self, url: str) -> None:
        super().__init__(url)
        prefix = self.given["prefix"]
        self._channel = f"{prefix}:members"
        self._prefix = f"{prefix}:member:"
        scheme = {"valkey": "redis", "valkeys": "rediss"}.get(
            self.url.scheme, self.url.scheme
        )
        plain = self.url._replace(scheme=scheme, query=urlencode({}))
        try:
            self._redis: Redis = Redis.from_url(
                plain.geturl(),
                socket_connect_timeout=_CONNECT_S,
                socket_timeout=_SILENCE_S,
                socket_keepalive=True,
                # Who calls tries again, and reads everything anew.
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as exc:
            raise UsageError(f"directory {self}: {exc}") from None

    async def write(self, key: str, value: bytes, lease_s: float) -> None:
        with self.failing(RedisError):
            async with self._redis.pipeline(transaction=True) as batch:
                batch.set(self._prefix + key, value, px=int(lease_s * 1000))
                batch.publish(self._channel, key.encode() + b"\n" + value)
                await batch.execute()

    async def erase(self, key: str) -> None:
        with self.failing(RedisError):
            async with self._redis.pipeline(transaction=True) as batch:
                batch.delete(self._prefix + key)
                batch.publish(self._channel, key.encode() + b"\n")
                await batch.execute()

    async def follow(self) -> AsyncGenerator[Batch, None]:
        with self.failing(RedisError):
            async with self._redis.pubsub() as channel:
                await channel.subscribe(self._channel)
                async with asyncio.timeout(_SILENCE_S):
                    while (await self._next(channel))["type"] != "subscribe":
                        pass
                yield await self._all()
                while True:
                    message = await self._next(channel)
                    if message["type"] == "message":
                        key, _, value = message["data"].partition(b"\n")
                        yield {key.decode(errors="replace"): value or None}

    async def disconnect(self) -> None:
        await self._redis.aclose()

    async def _next(self, channel: PubSub) -> dict[str, Any]:
        """Wait for what the channel says; ask in between if the server is there."""
        for _ in range(2):
            message: dict[str, Any] | None = await channel.get_message(
                timeout=_SILENCE_S
            )
            if message is not None:
                return message
            await channel.ping()
        raise TimeoutError(f"silent for {2 * _SILENCE_S:g} s")

    async def _all(self) -> dict[str, bytes | None]:
        """Return every record."""
        names: list[bytes] = []
        # Its own characters are meant, and no pattern by them.
        prefix = re.sub(r"([*?\[\]\\^])", r"\\\1", self._prefix)
        async for name in self._redis.scan_iter(f"{prefix}*", count=_PAGE):
            names.append(name)
            if len(names) == MEMBERS_MAX:
                break
        found: dict[str, bytes | None] = {}
        for start in range(0, len(names), _PAGE):
            page = names[start : start + _PAGE]
            values: list[Any] = await self._redis.mget(page)
            for name, value in zip(page, values, strict=True):
                # It may be over meanwhile.
                if value is not None:
                    key = name.decode(errors="replace").removeprefix(self._prefix)
                    found[key] = value
        return found
