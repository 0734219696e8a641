"""A tier in Redis or Valkey: ``redis://host:6379``, one value for each block.

A single server or a cluster: the service itself handles sharding, replication,
failover, eviction and expiry.

A call's keys are grouped by server. Each server gets its group as pipelines, and all
servers are called at the same time. A server that fails, or misses the deadline, is
skipped until a task has found a server that accepts writes, or has reread the cluster's
slot table; see :mod:`kvwire.directory.redis_servers`. A server that refuses writes is
still read, and an error that concerns one key is that key's alone.

An image is copied once, after its head, before it is written: redis-py may touch the
memory that it gets for as long as its connection lives, and does not report its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from kvwire.aio import Upkeep, gather_all
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
from kvwire_store.limits import (
    STORE_NODE_TIMEOUT_S,
    STORE_PIPELINE_BYTES,
    STORE_REDIAL_S,
    STORE_REDIAL_S_MAX,
    STORE_TTL_S_MAX,
)
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
from kvwire_store.tiers.redis_nodes import ask, of_writes, renew
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
        # Servers that have failed since the servers were last looked up, and servers
        # that refuse writes: these may still be read.
        self._failing: set[str] = set()
        self._refusing: set[str] = set()
        self._writes = Upkeep(
            STORE_REDIAL_S, STORE_NODE_TIMEOUT_S, steady_s=STORE_REDIAL_S_MAX
        )

    @property
    def asks(self) -> bool:  # type: ignore[override]
        return self._servers.client is not None

    @property
    def taking(self) -> bool:
        return self._servers.client is not None and "" not in self._refusing

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

        answers = await self._ask("get", np.concatenate([keys, touched]), command)
        found = answers[: keys.size]
        self._require("GETRANGE", found, bytes)
        return [one if isinstance(one, bytes) else BlockResult.FAILED for one in found]

    async def put(self, batch: Batch) -> BlockResults:
        values = await self._threads.run(partial(packed, batch))

        def command(at: int, name: str) -> Command:
            return "SET", name, values[at].data, *self._expiry

        nbytes = HEAD_BYTES + int(batch.images.lengths.max())
        done = await self._ask("put", batch.keys, command, nbytes)
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
        answers = await self._ask("get", batch.keys, lambda _, name: ("STRLEN", name))
        self._require("STRLEN", answers, int)
        results = np.full(batch.keys.size, FAILED)
        results[[one == 0 for one in answers]] = MISSING
        results[[isinstance(one, int) and one > nbytes for one in answers]] = DAMAGED
        fit = [isinstance(one, int) and 0 < one <= nbytes for one in answers]
        which = np.flatnonzero(fit)
        values = await self._ask(
            "get", batch.keys[which], lambda _, name: ("GET", name), nbytes
        )
        self._require("GET", values, bytes, type(None))
        results[which[[one is None for one in values]]] = MISSING
        came = which[[isinstance(one, bytes) for one in values]]
        raws = [memoryview(one) for one in values if isinstance(one, bytes)]
        await self.unpack(batch, came, raws, results)
        self._touches.moved(batch.keys[results == LANDED])
        return results

    async def remove(self, keys: Keys) -> Bits:
        done = await self._ask("remove", keys, lambda _, name: ("UNLINK", name))
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
        what: str,
        keys: Keys,
        command: Callable[[int, str], Command],
        nbytes: int = HEAD_BYTES,
    ) -> list[Any]:
        """Send a command for each key; return each answer, or an error in its place.

        Args:
            what: The kind of request, see :meth:`note`.
            keys: The blocks.
            command: Makes a command of a position and the name of a value.
            nbytes: How long a command or its answer may be.
        """
        away = ConnectionError(self.error or "it is not connected")
        done: list[Any] = [away] * keys.size
        if self._servers.client is None:
            return done
        most = max(1, STORE_PIPELINE_BYTES // nbytes)
        writes = what == "put"

        async def ask_one(client: RedisClient, node: Any, positions: list[int]) -> None:
            server = node.name if node is not None else ""
            for first in range(0, len(positions), most):
                some = positions[first : first + most]
                if server in self._failing or (writes and server in self._refusing):
                    return
                commands = [command(at, self.value_name(keys[at])) for at in some]
                answers = await self._sent(what, client, node, commands)
                for at, answer in zip(some, answers, strict=False):
                    done[at] = answer

        async with self._servers.use() as client:
            servers = self._by_server(client, keys)
            await gather_all(*(ask_one(client, *one) for one in servers))
        return done

    async def _sent(
        self, what: str, client: RedisClient, node: Any, commands: list[Command]
    ) -> list[Any]:
        """Send commands to one server; return the answers, or nothing if it fails."""
        server = node.name if node is not None else ""
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await ask(client, node, commands)
        except FAULTS as exc:
            if isinstance(exc, TimeoutError):
                exc = TimeoutError(f"no answer within {self._timeout_s:g} s")
            self._lost(client, exc, server)
            return []
        errors = [one for one in answers if _is_error(one)]
        refusal = next(filter(of_writes, errors), None)
        away = next(filter(of_server, errors), None)
        if refusal is not None:
            self._writes_refused(client, refusal, server)
        elif away is not None:
            self._lost(client, away, server)
        elif errors:
            self.note(what, error_text(errors[-1]))
        return answers

    def _require(self, command: str, answers: list[Any], *kinds: type) -> None:
        """Note it if an answer is neither an error nor of one of these types."""
        if not all(_is_error(one) or isinstance(one, kinds) for one in answers):
            what = "put" if command == "SET" else "get"
            self.note(what, f"its answer to {command} is none that Redis gives")

    def _by_server(
        self, client: RedisClient, keys: Keys
    ) -> list[tuple[Any, list[int]]]:
        """Return each cluster node with its keys' positions; None is a single server.

        Keys without a server are omitted.
        """
        if isinstance(client.commands, Redis):
            return [(None, list(range(keys.size)))]
        servers: dict[str, tuple[Any, list[int]]] = {}
        for at, key in enumerate(keys.tolist()):
            try:
                node = client.commands.get_node_from_key(self.value_name(key))
            except FAULTS as exc:  # no server has the slot
                self._lost(client, exc, "?")
                continue
            if node is not None:
                servers.setdefault(node.name, (node, []))[1].append(at)
        return list(servers.values())

    # --- the connection ---------------------------------------------------------------

    def _lost(self, client: RedisClient, error: BaseException, server: str) -> None:
        """Stop using a server, unless another client has already replaced this one."""
        if client is self._servers.client:
            self.lost(error, server)
            if isinstance(client.commands, Redis):
                self._servers.drop(client)

    def _writes_refused(
        self, client: RedisClient, error: BaseException, server: str
    ) -> None:
        """Stop writing to a server until it, or another in its place, takes writes."""
        if client is self._servers.client:
            self.note("put", f"{server} {error_text(error)}".strip())
            self._refusing.add(server)  # bounded: the servers of a cluster
            self._writes.lost(self.error)
            self._writes.start(self._take_again)

    async def _take_again(self) -> None:
        """Look for servers that accept writes after each pause, until all do."""
        async for _ in self._writes:
            try:
                self._refusing &= await self._still(self._refusing)
            except Exception as exc:  # noqa: BLE001 - or nobody would ever ask again
                self.note("put", error_text(exc))
            if not self._refusing:
                self._writes.back()
                self.settle("put")
                return
            self._writes.lost(self.error)

    def lost(self, error: BaseException, server: str = "") -> None:
        self._failing.add(server)  # bounded: the servers of a cluster
        super().lost(error, server)

    async def connect(self) -> None:
        await self._servers.connect()

    async def disconnect(self) -> None:
        await self._writes.close()
        await self._servers.close()

    async def is_back(self) -> bool:
        self._failing &= await self._still(self._failing)
        return not self._failing

    async def _still(self, doubtful: set[str]) -> set[str]:
        """Return which of these servers still accept no writes, after looking again."""
        return await renew(self._servers, doubtful, self._prefix, self._timeout_s)


def _is_error(answer: object) -> bool:
    return isinstance(answer, BaseException)
