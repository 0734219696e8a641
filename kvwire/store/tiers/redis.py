"""A tier in Redis or Valkey: ``redis://host:6379``, one value for each block.

A single server or a cluster: sharding, replication, failover, eviction and times to
live are theirs.

All keys of a call that one server has go to it as pipelines, side by side with those
of the others. One that fails, or has not answered by the deadline, is passed over from
then on, until a task has asked the cluster anew who has which slots.

An image is copied once in front of a write, behind its head: what redis-py was given
may be touched by its connection as long as that lives, and nobody says until when.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias
from urllib.parse import urlsplit

import numpy as np

from kvwire.errors import UsageError
from kvwire.extras import needed_by
from kvwire.kv.blocks import Bits
from kvwire.limits import STORE_PIPELINE_BYTES, STORE_TTL_S_MAX
from kvwire.store.address import TierAddress
from kvwire.store.cleanup import error_text, gather_all
from kvwire.store.index import Key, Keys, Orders
from kvwire.store.namespace import ABSENT, Namespace
from kvwire.store.tiers.base import (
    FAILED,
    LANDED,
    MISSING,
    REFUSED,
    Batch,
    BlockResults,
    Touches,
)
from kvwire.store.tiers.object_format import HEAD_BYTES, ObjectHead, packed
from kvwire.store.tiers.values import ValueTier

with needed_by("a tier in Redis", extra="redis"):
    from redis import exceptions
    from redis.asyncio import Redis, RedisCluster
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import (
        AuthenticationError,
        OutOfMemoryError,
        RedisClusterException,
        RedisError,
    )

logger: logging.Logger = logging.getLogger("kvwire.store")

Command: TypeAlias = tuple[Any, ...]

# Of the client of a cluster one kind is no RedisError.
_FAULTS: Final = (RedisError, RedisClusterException, OSError, LookupError)
# Errors that say something of the server, or where slots are, and not of one command.
_AWAY: Final = (
    OSError,
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ClusterDownError,
    exceptions.AskError,
    exceptions.ReadOnlyError,
    exceptions.TryAgainError,
)
_SCHEMES: Final = {"valkey": "redis", "valkeys": "rediss"}
_TLS: Final = {
    "tls_ca_file": "ssl_ca_certs",
    "tls_cert_file": "ssl_certfile",
    "tls_key_file": "ssl_keyfile",
}
# Keys that one SCAN looks at.
_PAGE: Final = 1000


class RedisTier(ValueTier):
    """Keeps blocks in a Redis, a Valkey or a cluster of them. Made by :meth:`open`.

    Its address is ``redis://HOST:PORT,HOST:PORT?prefix=NAME&ttl=SECONDS``. ``rediss``
    is TLS, ``valkey`` and ``valkeys`` the same. Whether it is a cluster the first
    server says that answers.
    """

    faults: ClassVar[tuple[type[Exception], ...]] = _FAULTS
    refusals: ClassVar[tuple[type[Exception], ...]] = (
        AuthenticationError,
        ValueError,
        TypeError,
    )

    def __init__(self, address: TierAddress) -> None:
        super().__init__(address, "prefix", "ttl", "timeout", *_TLS)
        scheme = _SCHEMES.get(address.scheme, address.scheme)
        url = urlsplit(f"{scheme}:{address.place}")
        who, at, hosts = url.netloc.rpartition("@")
        if not hosts:
            raise UsageError(
                f"tier {address.text!r}: write {address.scheme}://HOST:PORT"
            )
        self._urls = [
            f"{scheme}://{who}{at}{host}{url.path}" for host in hosts.split(",")
        ]
        options = address.options
        ttl_s = address.number("ttl", 0, STORE_TTL_S_MAX)
        self._expiry: Command = ("PX", max(1, int(ttl_s * 1000))) if ttl_s else ()
        self._arguments: dict[str, Any] = {
            "socket_connect_timeout": self._timeout_s,
            "socket_timeout": self._timeout_s,
            # Who calls is told, and a task of this tier tries again.
            "retry": Retry(NoBackoff(), 0),
            **{_TLS[name]: options[name] for name in _TLS if name in options},
        }
        self._client: Redis | RedisCluster | None = None
        self._touches = Touches()

    @property
    def asks(self) -> bool:  # type: ignore[override]
        return self._client is not None

    @property
    def taking(self) -> bool:
        return self._client is not None

    async def find(self, keys: Keys) -> Orders:
        """Return the order of each block's image, or ``ABSENT``; one round trip."""
        touched = self._touches.take()
        asked = np.concatenate([keys, touched])

        def command(at: int, name: str) -> Command:
            if at < keys.size:
                return "GETRANGE", name, 0, HEAD_BYTES - 1
            return "TOUCH", name

        heads = (await self._ask(asked, command))[: keys.size]
        return np.fromiter(map(_order, keys.tolist(), heads), np.uint8, keys.size)

    def touch(self, keys: Keys) -> None:
        """Note a use; the servers hear of it when something is looked for."""
        self._touches.add(keys)

    async def delete_namespace(self, digest: bytes) -> None:
        """Delete every value of a namespace, whoever has put it; looks at all keys."""
        if self._client is None:
            raise OSError(f"{self.name}: {self.error}")
        pattern = f"{self._prefix}{digest.hex()}/*"
        try:
            names: list[Any] = []
            async for name in self._client.scan_iter(match=pattern, count=_PAGE):
                names.append(name)
                if len(names) == _PAGE:
                    await self._client.unlink(*names)
                    names.clear()
            if names:
                await self._client.unlink(*names)
        except _FAULTS as exc:
            raise OSError(f"{self.name}: {error_text(exc)}") from exc

    # --- blocks -----------------------------------------------------------------------

    async def _write(self, namespace: Namespace, batch: Batch) -> BlockResults:
        values = await self._threads.run(partial(packed, batch))

        def command(at: int, name: str) -> Command:
            return "SET", name, values[at].data, *self._expiry

        nbytes = HEAD_BYTES + int(batch.images.lengths[0])
        done = await self._ask(batch.keys, command, nbytes)
        results = np.where(list(map(_is_error, done)), FAILED, LANDED)
        results[[isinstance(one, OutOfMemoryError) for one in done]] = REFUSED
        self._touches.moved(batch.keys[results == LANDED])
        return results

    async def _get(self, batch: Batch) -> BlockResults:
        nbytes = HEAD_BYTES + int(batch.images.lengths[0])
        done = await self._ask(batch.keys, lambda _, name: ("GET", name), nbytes)
        results = np.where([one is None for one in done], MISSING, FAILED)
        came = np.flatnonzero([isinstance(one, bytes) for one in done])
        raws = [memoryview(done[at]) for at in came]
        await self._unpack(batch, came, raws, results)
        self._touches.moved(batch.keys[results == LANDED])
        return results

    async def _remove(self, keys: Keys) -> Bits:
        done = await self._ask(keys, lambda _, name: ("UNLINK", name))
        return ~np.fromiter(map(_is_error, done), np.bool_, len(done))

    # --- requests ---------------------------------------------------------------------

    async def _ask(
        self,
        keys: Keys,
        command: Callable[[int, str], Command],
        nbytes: int = HEAD_BYTES,
    ) -> list[Any]:
        """Send a command for each key; return each answer, or an error in its place."""
        away = ConnectionError(self.error or "it is not connected")
        done: list[Any] = [away] * keys.size
        if self._client is None:
            return done
        client, most = self._client, max(1, STORE_PIPELINE_BYTES // nbytes)

        async def ask(server: str, positions: list[int]) -> None:
            for first in range(0, len(positions), most):
                some = positions[first : first + most]
                if server in self._failing:
                    return
                commands = (command(at, self._name(keys[at])) for at in some)
                answers = await self._pipelined(client, server, commands)
                for at, answer in zip(some, answers, strict=False):
                    done[at] = answer

        servers = self._by_server(client, keys)
        await gather_all(*(ask(server, some) for server, some in servers.items()))
        return done

    async def _pipelined(
        self,
        client: Redis | RedisCluster,
        server: str,
        commands: Iterable[Command],
    ) -> list[Any]:
        """Send commands to one server; return the answers, or nothing if it fails."""
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            async with asyncio.timeout(self._timeout_s):
                answers: list[Any] = await pipeline.execute(raise_on_error=False)
        except _FAULTS as exc:
            self._failed(exc, server)
            return []
        for answer in answers:
            if isinstance(answer, _AWAY):
                self._failed(answer, server)
                break
            if isinstance(answer, Exception):
                self._note(error_text(answer))
        return answers

    def _by_server(
        self, client: Redis | RedisCluster, keys: Keys
    ) -> dict[str, list[int]]:
        """Return the positions of the keys that each server has, but those of none."""
        if isinstance(client, Redis):
            return {"": list(range(keys.size))}
        servers: dict[str, list[int]] = {}
        for at, key in enumerate(keys.tolist()):
            try:
                node = client.get_node_from_key(self._name(key))
            except _FAULTS as exc:  # nobody has the slot
                self._failed(exc, "?")
                continue
            if node is not None:
                servers.setdefault(node.name, []).append(at)
        return servers

    # --- who is there -----------------------------------------------------------------

    async def _connect(self) -> None:
        """Find a server that answers, and learn whether it is one of a cluster."""
        fault: Exception = ConnectionError("no server")
        for url in self._urls:
            client: Redis = Redis.from_url(url, **self._arguments)
            try:
                async with asyncio.timeout(self._timeout_s):
                    told = await client.info("cluster")
                    if not told.get("cluster_enabled"):
                        self._client = client
                        return
                    self._client = await _cluster(url, self._arguments)
            except AuthenticationError:
                await _closed(client)
                raise
            except _FAULTS as exc:
                fault = exc
            await _closed(client)
            if self._client is not None:
                return
        raise fault

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await _closed(client)

    async def _is_back(self) -> bool:
        if self._client is None:
            await self._connect()
        async with asyncio.timeout(self._timeout_s):
            if isinstance(self._client, RedisCluster):
                await self._client.nodes_manager.initialize()
            elif self._client is not None:
                await self._client.ping()
        return True


async def _cluster(url: str, arguments: dict[str, Any]) -> RedisCluster:
    """Return the client of a cluster, with the slots that somebody has."""
    cluster: RedisCluster = RedisCluster.from_url(
        url,
        require_full_coverage=False,
        # It would close what others wait for; a task of the tier asks anew instead.
        reinitialize_steps=0,
        **arguments,
    )
    try:
        return await cluster.initialize()
    except BaseException:
        await _closed(cluster)
        raise


async def _closed(client: Redis | RedisCluster) -> None:
    try:
        await client.aclose()
    except _FAULTS as exc:
        logger.debug("closing a connection to Redis: %s", exc)


def _order(key: Key, raw: Any) -> int:
    """Return the order that a head names, or ``ABSENT`` if it is none of that key."""
    head = ObjectHead.read(memoryview(raw)) if isinstance(raw, bytes) else None
    return head.order if head is not None and head.key == key else ABSENT


def _is_error(answer: object) -> bool:
    return isinstance(answer, BaseException)
