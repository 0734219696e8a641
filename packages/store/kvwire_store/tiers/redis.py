"""A tier in Redis or Valkey: ``redis://host:6379``, one value for each block.

A single server or a cluster: the service itself handles sharding, replication,
failover, eviction and expiry.

A call's keys are grouped by server. Each server gets its group as pipelines, and all
servers are called at the same time. A server that fails, or misses the deadline, is
skipped until a task has found a server that accepts writes, or has reread the cluster's
slot table; see :mod:`kvwire.directory.redis_servers`.

An image is copied once, after its head, before it is written: redis-py may touch the
memory that it gets for as long as its connection lives, and does not report its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from kvwire.aio import gather_all
from kvwire.directory.redis_servers import (
    FAULTS,
    TLS_OPTIONS,
    RedisClient,
    RedisServers,
    as_pattern,
    of_server,
)
from kvwire.errors import UsageError, error_text, printable
from kvwire.extras import needed_by
from kvwire.kv.blocks import Bits
from kvwire_store.address import TierAddress
from kvwire_store.keys import Keys
from kvwire_store.limits import STORE_PIPELINE_BYTES, STORE_TTL_S_MAX
from kvwire_store.tiers.base import (
    DAMAGED,
    FAILED,
    LANDED,
    MISSING,
    REFUSED,
    Batch,
    BlockResult,
    BlockResults,
    Touches,
)
from kvwire_store.tiers.object_format import HEAD_BYTES, packed
from kvwire_store.tiers.values import Head, KeyValueTier

with needed_by("a tier in Redis", extra="redis", distribution="kvwire-store"):
    from redis.asyncio import Redis
    from redis.exceptions import AuthenticationError, OutOfMemoryError

Command: TypeAlias = tuple[Any, ...]

# How many keys one SCAN examines.
_PAGE: Final = 1000


class RedisTier(KeyValueTier):
    """Keeps blocks in a Redis, a Valkey or a cluster of them. Made by :meth:`open`.

    Its address is ``redis://HOST:PORT,HOST:PORT?prefix=NAME&ttl=SECONDS``. ``rediss``
    means TLS; ``valkey`` and ``valkeys`` mean the same as ``redis`` and ``rediss``. The
    first server that accepts writes reports whether it is part of a cluster.
    """

    faults: ClassVar[tuple[type[Exception], ...]] = FAULTS
    refusals: ClassVar[tuple[type[Exception], ...]] = (AuthenticationError, UsageError)
    # The same as in a directory's keys, so that one access-control pattern covers both.
    separator: ClassVar[str] = ":"

    def __init__(self, address: TierAddress) -> None:
        address.require("prefix", "ttl", "timeout", *TLS_OPTIONS)
        super().__init__(address)
        self._servers = RedisServers(
            f"tier {address.text!r}",
            f"{address.scheme}:{address.place}",
            address.options,
            timeout_s=self._timeout_s,
            key=self._prefix,
        )
        ttl_s = address.number("ttl", 0, STORE_TTL_S_MAX)
        self._expiry: Command = ("PX", max(1, int(ttl_s * 1000))) if ttl_s else ()
        self._touches = Touches()
        # Servers that have failed since the servers were last looked up.
        self._failing: set[str] = set()

    @property
    def asks(self) -> bool:  # type: ignore[override]
        return self._servers.client is not None

    @property
    def taking(self) -> bool:
        return self._servers.client is not None

    def touch(self, keys: Keys) -> None:
        """Record a use, which is sent with the next lookup."""
        self._touches.add(keys)

    # --- values -----------------------------------------------------------------------

    async def heads(self, keys: Keys) -> list[Head]:
        """Read the heads, and report the recorded uses, in one round trip."""
        touched = self._touches.take()

        def command(at: int, name: str) -> Command:
            if at < keys.size:
                return "GETRANGE", name, 0, HEAD_BYTES - 1
            return "TOUCH", name

        answers = await self._ask(np.concatenate([keys, touched]), command)
        found = answers[: keys.size]
        self._require("GETRANGE", found, bytes)
        return [one if isinstance(one, bytes) else BlockResult.FAILED for one in found]

    async def put(self, batch: Batch) -> BlockResults:
        values = await self._threads.run(partial(packed, batch))

        def command(at: int, name: str) -> Command:
            return "SET", name, values[at].data, *self._expiry

        nbytes = HEAD_BYTES + int(batch.images.lengths.max())
        done = await self._ask(batch.keys, command, nbytes)
        # Where the server does not answer OK, the client returns None or False.
        self._require("SET", [one or None for one in done], bool)
        results = np.where([one is True for one in done], LANDED, FAILED)
        results[[isinstance(one, OutOfMemoryError) for one in done]] = REFUSED
        self._touches.moved(batch.keys[results == LANDED])
        return results

    async def get_into(self, batch: Batch) -> BlockResults:
        nbytes = HEAD_BYTES + int(batch.images.lengths[0])
        # Values that are too long are not read. A GETRANGE needs one round trip, but
        # takes a server three times as long as a GET.
        answers = await self._ask(batch.keys, lambda _, name: ("STRLEN", name))
        self._require("STRLEN", answers, int)
        results = np.full(batch.keys.size, FAILED)
        results[[one == 0 for one in answers]] = MISSING
        results[[isinstance(one, int) and one > nbytes for one in answers]] = DAMAGED
        fit = [isinstance(one, int) and 0 < one <= nbytes for one in answers]
        which = np.flatnonzero(fit)
        values = await self._ask(
            batch.keys[which], lambda _, name: ("GET", name), nbytes
        )
        self._require("GET", values, bytes, type(None))
        results[which[[one is None for one in values]]] = MISSING
        came = which[[isinstance(one, bytes) for one in values]]
        raws = [memoryview(one) for one in values if isinstance(one, bytes)]
        await self.unpack(batch, came, raws, results)
        self._touches.moved(batch.keys[results == LANDED])
        return results

    async def remove(self, keys: Keys) -> Bits:
        done = await self._ask(keys, lambda _, name: ("UNLINK", name))
        return ~np.fromiter(map(_is_error, done), np.bool_, len(done))

    async def remove_folder(self, folder: str) -> None:
        """Remove a folder's values; scans all keys of the database."""
        if self._servers.client is None:
            raise OSError(f"{self.name}: {self.error}")
        async with self._servers.use() as client:
            try:
                names: list[Any] = []
                pattern = f"{as_pattern(folder)}*"
                async for name in client.commands.scan_iter(pattern, count=_PAGE):
                    names.append(name)
                    if len(names) == _PAGE:
                        await client.commands.unlink(*names)
                        names.clear()
                if names:
                    await client.commands.unlink(*names)
            except FAULTS as exc:
                if of_server(exc):
                    self._lost(client, exc, "?")
                text = printable(error_text(exc))
                raise OSError(f"{self.name}: {text}") from exc

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
        if self._servers.client is None:
            return done
        most = max(1, STORE_PIPELINE_BYTES // nbytes)

        async def ask(client: RedisClient, server: str, positions: list[int]) -> None:
            for first in range(0, len(positions), most):
                some = positions[first : first + most]
                if server in self._failing:
                    return
                commands = (command(at, self.value_name(keys[at])) for at in some)
                answers = await self._pipelined(client, server, commands)
                for at, answer in zip(some, answers, strict=False):
                    done[at] = answer

        async with self._servers.use() as client:
            servers = self._by_server(client, keys)
            await gather_all(*(ask(client, *one) for one in servers.items()))
        return done

    async def _pipelined(
        self, client: RedisClient, server: str, commands: Iterable[Command]
    ) -> list[Any]:
        """Send commands to one server; return the answers, or nothing if it fails."""
        pipeline = client.commands.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            async with asyncio.timeout(self._timeout_s):
                answers: list[Any] = await pipeline.execute(raise_on_error=False)
        except FAULTS as exc:
            if isinstance(exc, TimeoutError):
                exc = TimeoutError(f"no answer within {self._timeout_s:g} s")
            self._lost(client, exc, server)
            return []
        errors = [one for one in answers if _is_error(one)]
        away = next(filter(of_server, errors), None)
        if away is not None:
            self._lost(client, away, server)
        elif errors:
            self.note(error_text(errors[-1]))
        return answers

    def _require(self, command: str, answers: list[Any], *kinds: type) -> None:
        """Note it if an answer is neither an error nor of one of these types."""
        if not all(_is_error(one) or isinstance(one, kinds) for one in answers):
            self.note(f"its answer to {command} is none that Redis gives")

    def _by_server(self, client: RedisClient, keys: Keys) -> dict[str, list[int]]:
        """Return the positions of keys by server; omit keys without a server."""
        if isinstance(client.commands, Redis):
            return {"": list(range(keys.size))}
        servers: dict[str, list[int]] = {}
        for at, key in enumerate(keys.tolist()):
            try:
                node = client.commands.get_node_from_key(self.value_name(key))
            except FAULTS as exc:  # no server has the slot
                self._lost(client, exc, "?")
                continue
            if node is not None:
                servers.setdefault(node.name, []).append(at)
        return servers

    # --- the connection ---------------------------------------------------------------

    def _lost(self, client: RedisClient, error: BaseException, server: str) -> None:
        """Stop using a server, unless another client has already replaced this one."""
        if client is self._servers.client:
            self.lost(error, server)
            if isinstance(client.commands, Redis):
                self._servers.drop(client)

    def lost(self, error: BaseException, server: str = "") -> None:
        self._failing.add(server)  # bounded: the servers of a cluster
        super().lost(error, server)

    async def connect(self) -> None:
        await self._servers.connect()

    async def disconnect(self) -> None:
        await self._servers.close()

    async def is_back(self) -> bool:
        self._failing &= await self._servers.renew(self._failing)
        return not self._failing


def _is_error(answer: object) -> bool:
    return isinstance(answer, BaseException)
