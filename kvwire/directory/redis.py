"""Redis or Valkey as a directory: one key per member, with a TTL, and a channel.

Each write sets the key and then publishes the same value on the channel; a watcher
subscribes first and reads the keys afterwards, so that it misses no change in between.
Only plain commands are used, not keyspace notifications, which have to be enabled on a
server. After a restart without data, renewals fill the server again within a third of a
lease.

The URL names one server, several servers one of which accepts writes, or a cluster: see
:mod:`kvwire.directory.redis_servers`. In a cluster, a message published at one server
reaches all servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final

from kvwire.directory.base import Batch, Directory
from kvwire.directory.limits import MEMBERS_MAX, RECORD_BYTES_MAX
from kvwire.directory.redis_servers import (
    FAULTS,
    TLS_OPTIONS,
    RedisClient,
    RedisServers,
    as_pattern,
    of_server,
)
from kvwire.errors import ConnectError, printable
from kvwire.extras import needed_by

with needed_by("a directory in Redis", extra="redis"):
    from redis.asyncio.client import PubSub
    from redis.exceptions import AskError, NoPermissionError, TryAgainError

# The limit for a connection, and for each answer.
_TIMEOUT_S: Final = 5.0
# How many keys are read at once.
_PAGE: Final = 256
# How many keys a server examines in one step. A tier's blocks may be there as well: for
# a million of them, this takes 2 s, and in steps of 256 it takes 6 s.
_STEP: Final = 5000


class RedisDirectory(Directory):
    """Keeps records on a server: ``redis://``, ``rediss://`` (TLS) or ``valkey://``.

    Attributes:
        silence_s: After this silence a channel is tested with a message of its own,
            which may take the same time again. Renewals of others also show that the
            channel works.
    """

    silence_s: float = 5.0
    # Fleets that share a server have different prefixes.
    options: ClassVar[Mapping[str, str]] = {
        "prefix": "kvwire",
        **dict.fromkeys(TLS_OPTIONS, ""),
    }
    many_hosts = True

    def __init__(self, url: str) -> None:
        super().__init__(url)
        prefix = self.given["prefix"]
        self._channel = f"{prefix}:members"
        self._prefix = f"{prefix}:member:"
        self._servers = RedisServers(
            f"directory {self}",
            self.url._replace(query="").geturl(),
            self.given,
            timeout_s=_TIMEOUT_S,
            key=self._prefix,
        )

    async def write(self, key: str, value: bytes, lease_s: float) -> None:
        async with self._used() as client:
            name = self._prefix + key
            if not await client.commands.set(name, value, px=int(lease_s * 1000)):
                raise ConnectionError("the server's answer to SET was not OK")
            await client.channel.publish(self._channel, key.encode() + b"\n" + value)

    async def erase(self, key: str) -> None:
        async with self._used() as client:
            await client.commands.unlink(self._prefix + key)
            await client.channel.publish(self._channel, key.encode() + b"\n")

    async def follow(self) -> AsyncGenerator[Batch, None]:
        async with self._used() as client, client.channel.pubsub() as channel:
            await channel.subscribe(self._channel)
            async with asyncio.timeout(_TIMEOUT_S):
                while (await self._next(client, channel))["type"] != "subscribe":
                    pass
            yield await self._all(client)
            while True:
                message = await self._next(client, channel)
                if message["type"] == "message" and message["data"]:
                    key, _, value = message["data"].partition(b"\n")
                    yield {key.decode(errors="replace"): value or None}

    async def disconnect(self) -> None:
        await self._servers.close()

    @asynccontextmanager
    async def _used(self) -> AsyncIterator[RedisClient]:
        """Use a server that accepts writes; drop it when it fails."""
        try:
            await self._servers.connect()
            async with self._servers.use() as client:
                try:
                    yield client
                except FAULTS as exc:
                    if of_server(exc):
                        self._servers.drop(client)
                    raise
        except FAULTS as exc:
            text = printable(str(exc) or type(exc).__name__)
            raise ConnectError(f"directory {self}: {text}", address=str(self)) from exc

    async def _next(self, client: RedisClient, channel: PubSub) -> dict[str, Any]:
        """Wait for a message; test the server if none arrives."""
        for _ in range(2):
            message: dict[str, Any] | None = await channel.get_message(
                timeout=self.silence_s
            )
            if message is not None:
                return message
            await self._stir(client, channel)
        raise TimeoutError(f"the server sent nothing for {2 * self.silence_s:g} s")

    async def _stir(self, client: RedisClient, channel: PubSub) -> None:
        """Publish a message on the channel, once the server has accepted a write.

        A working connection may lead to a server that is cut off: a replica whose
        primary cannot be reached. A user without write permission still sends the
        write, since the server's answer shows whether it is a replica.
        """
        await client.check(self._prefix)
        try:
            await client.channel.publish(self._channel, b"")
        except NoPermissionError:
            await channel.ping()

    async def _all(self, client: RedisClient) -> dict[str, bytes | None]:
        """Return every record."""
        names: list[bytes] = []
        pattern = f"{as_pattern(self._prefix)}*"
        async for name in client.commands.scan_iter(pattern, count=_STEP):
            names.append(name)
            if len(names) == MEMBERS_MAX:
                break
        found: dict[str, bytes | None] = {}
        for start in range(0, len(names), _PAGE):
            page = names[start : start + _PAGE]
            pipeline = client.commands.pipeline(transaction=False)
            for name in page:
                # One byte more than a record may have, so that longer values are not
                # read completely.
                pipeline.getrange(name, 0, RECORD_BYTES_MAX)
            values = await pipeline.execute(raise_on_error=False)
            for name, value in zip(page, values, strict=True):
                # A key on its way has not left, and another one is no record.
                if isinstance(value, AskError | TryAgainError):
                    raise value
                if isinstance(value, Exception) and of_server(value):
                    raise value
                # It may have expired meanwhile, or not be text.
                if value and isinstance(value, bytes):
                    key = name.decode(errors="replace").removeprefix(self._prefix)
                    found[key] = value
        return found
