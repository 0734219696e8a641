"""The Redis or Valkey servers that a URL names, for directories and tiers.

Only a server that accepts writes is used. If it fails, or refuses to serve (it became a
replica, is loading its data, or has lost its replicas or its disk), it is dropped with
all its connections, since an open connection leads to the same server for ever, even if
the name now points to another one. Then all addresses of all hosts are tried, each 250
ms after the previous one (RFC 8305), until a server accepts a write. So Sentinel is not
needed, whether the URL has a name that moves, a list of hosts, or a name with the
addresses of all servers.

This module does not retry; directories and tiers retry with their own pauses.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvwire.aio import (
    end_task,
    gather_all,
    look_up,
    run_to_completion,
    start_task,
)
from kvwire.config import local_path
from kvwire.errors import UsageError, not_looked_up, printable
from kvwire.extras import needed_by
from kvwire.limits import DIAL_DELAY_S

with needed_by("Redis", extra="redis"):
    from redis import exceptions
    from redis.asyncio import (
        Connection,
        ConnectionPool,
        Redis,
        RedisCluster,
        SSLConnection,
    )
    from redis.asyncio.connection import parse_url
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

logger: logging.Logger = logging.getLogger("kvwire.directory")

FAULTS: Final = (Exception,)
"""The exceptions that the client may raise: an invalid answer can break its parser."""

TLS_OPTIONS: Final[Mapping[str, str]] = {
    "tls_ca_file": "ssl_ca_certs",
    "tls_cert_file": "ssl_certfile",
    "tls_key_file": "ssl_keyfile",
}
"""A URL's options, with the client's names for them."""

_SCHEMES: Final = {"valkey": "redis", "valkeys": "rediss"}
# Errors that concern one command or one key. All others with a code (NOREPLICAS,
# MISCONF, BUSY, ...) concern the server.
_OF_COMMAND: Final = ("WRONGTYPE", "SELECT", "TRYAGAIN", "ASK", "MOVED")
_CONNECTING: Final = re.compile(r"^Error \S+ connecting to \S+\. ")
# The client's messages about a server that accepts and ends a connection; remedies.
_HUNG_UP: Final = {
    "max number of clients": "raise maxclients there, or end clients that it has",
    "while writing to socket|closed by server": (
        "it accepts connections and ends them: see its log; it may have as many "
        "clients as it takes (maxclients)"
    ),
}
_CODE: Final = re.compile(r"[A-Z]{3,}\b")
# Where one key of a cluster is, or will be.
_OF_KEY: Final = (exceptions.AskError, exceptions.TryAgainError)
_SLOT_WITHOUT_SERVER: Final = "Hash slot not served"


def of_server(error: BaseException) -> bool:
    """Return whether an error concerns the server, not just one command or key."""
    if not isinstance(error, exceptions.ResponseError):
        return True
    # While a slot moves or has no server, all other slots have theirs.
    if isinstance(error, _OF_KEY) or _SLOT_WITHOUT_SERVER in str(error):
        return False
    if isinstance(error, (exceptions.ReadOnlyError, exceptions.ClusterDownError)):
        return True
    code = code_of(error)
    return bool(code) and code not in _OF_COMMAND


def code_of(error: BaseException) -> str:
    """Return the server's code of an error that the client has no class for, or ""."""
    # The client then leaves the code in the error's text.
    code = _CODE.match(str(error)) if type(error) is exceptions.ResponseError else None
    return code[0] if code else ""


def as_pattern(text: str) -> str:
    """Escape a text for use in a SCAN pattern."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)


class Place(NamedTuple):
    """One address of a host that may be a server."""

    url: dict[str, Any]
    host: str
    port: int
    address: str

    def __str__(self) -> str:
        where = f"{self.host}:{self.port}"
        return where if self.address == self.host else f"{where} ({self.address})"


@dataclass(eq=False, slots=True)
class RedisClient:
    """A client for a server that accepts writes, or for its cluster.

    Attributes:
        commands: The client that sends commands.
        channel: The client that publishes and subscribes; in a cluster, on any server.
        users: The number of calls that are using it.
    """

    commands: Redis | RedisCluster
    channel: Redis
    users: int = 0

    async def check(self, key: str) -> None:
        """Test that the server accepts writes, by removing a key that is never set.

        Cancel safety: safe, it may be called again.
        """
        if self.commands is self.channel:
            await _mode(self.channel)
        await _write(self.commands, key)

    async def close(self) -> None:
        """Close all connections. Never raises.

        Cancel safety: the close is finished first.
        """
        clients = {self.commands, self.channel}
        await run_to_completion(gather_all(*map(_closed, clients)))


class RedisServers:
    """A URL's servers, one of which accepts writes.

    Args:
        what: The tier's or directory's name in errors.
        url: ``redis://USER:PASSWORD@HOST:PORT,HOST:PORT/DATABASE``; ``rediss`` uses
            TLS; ``valkey`` and ``valkeys`` are synonyms of these two.
        options: The options from ``TLS_OPTIONS`` that were given.
        timeout_s: The limit for a connection, and for each answer.
        key: A key that is never set; a server that removes it accepts writes.

    Raises:
        UsageError: The URL or an option cannot be used.

    Attributes:
        client: The client in use; None while no server is known to accept writes.
    """

    def __init__(
        self,
        what: str,
        url: str,
        options: Mapping[str, str],
        timeout_s: float,
        key: str,
    ) -> None:
        self.client: RedisClient | None = None
        self._what = what
        self._key = key
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._hosts = _hosts_of(what, url)
        # The cluster's nodes as last found, since the URL's nodes may be gone.
        self._nodes: list[dict[str, Any]] = []
        files = {
            TLS_OPTIONS[name]: _file(what, name, text)
            for name, text in options.items()
            if name in TLS_OPTIONS and text
        }
        self._arguments: dict[str, Any] = {
            "socket_connect_timeout": timeout_s,
            "socket_timeout": timeout_s,
            "socket_keepalive": True,
            # The tier or directory itself retries.
            "retry": Retry(NoBackoff(), 0),
            # With RESP3, the client does not notice when an idle connection was closed.
            "protocol": 2,
        }
        # Before release 6, the client does not check the name in a certificate by
        # default.
        self._tls: dict[str, Any] = {"ssl_check_hostname": True, **files}
        # As in kvwire.directory.tls. Older releases of the client have no such option.
        if "ssl_exclude_verify_flags" in signature(SSLConnection.__init__).parameters:
            self._tls["ssl_exclude_verify_flags"] = [ssl.VERIFY_X509_STRICT]

    @asynccontextmanager
    async def use(self) -> AsyncIterator[RedisClient]:
        """Use the client; it stays open during the use, even if it is replaced.

        Raises:
            ConnectionError: No server is known to accept writes.

        Cancel safety: safe; the last user of a client that was replaced closes it.
        """
        client = self.client
        if client is None:
            raise ConnectionError("it is not connected")
        client.users += 1
        try:
            yield client
        finally:
            client.users -= 1
            if client is not self.client and not client.users:
                await client.close()

    def drop(self, client: RedisClient) -> None:
        """Stop using a client; its last user closes it."""
        if self.client is client:
            self.client = None

    async def connect(self) -> None:
        """Connect, unless connected already.

        Raises:
            Exception: No server accepts writes; the text gives a reason for each.

        Cancel safety: nothing stays open.
        """
        async with self._lock:
            if self.client is None:
                self.client = await self._found()

    async def reconnect(self) -> RedisClient:
        """Connect again, and read the slots of a cluster again; return the client.

        Raises:
            Exception: No server accepts writes; the text gives a reason for each.

        Cancel safety: nothing stays open.
        """
        client = await self._found()
        old = self.client
        self.client = client
        if old is not None and not old.users:
            await old.close()
        return client

    async def close(self) -> None:
        """Close all connections. No other call may be running. Never raises.

        Cancel safety: everything is released in any case.
        """
        client = self.client
        self.client = None
        if client is not None:
            await client.close()

    # --- the server that accepts writes -----------------------------------------------

    async def _found(self) -> RedisClient:
        """Return a client for the first place that accepts writes."""
        places, faults = await self._places()
        trying: dict[asyncio.Task[RedisClient], Place] = {}
        found: RedisClient | None = None
        try:
            while found is None and (places or trying):
                if places:
                    place = places.pop(0)
                    trying[start_task(self._probe(place))] = place
                done, _ = await asyncio.wait(
                    trying,
                    timeout=DIAL_DELAY_S if places else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    if (fault := task.exception()) is not None:
                        faults[str(trying.pop(task))] = fault
                    elif found is None:
                        found = task.result()
            if found is None:
                raise _worst(faults)
            return found
        finally:
            try:
                await run_to_completion(_given_up(trying, found))
            except asyncio.CancelledError:
                if found is not None:
                    await found.close()
                raise

    async def _places(self) -> tuple[list[Place], dict[str, BaseException]]:
        """Return all addresses of all hosts in order, and the hosts without any."""
        places: list[Place] = []
        faults: dict[str, BaseException] = {}

        async def resolve(url: dict[str, Any]) -> list[tuple[Any, ...]]:
            host = url["host"]
            port = url.get("port", 6379)
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await look_up(host, port)
            except TimeoutError:
                raise TimeoutError(not_looked_up(host, self._timeout_s)) from None

        hosts = list(self._hosts)
        hosts += [node for node in self._nodes if node not in hosts]
        answers = await asyncio.gather(*map(resolve, hosts), return_exceptions=True)
        for url, answer in zip(hosts, answers, strict=True):
            host = url["host"]
            port = url.get("port", 6379)
            if isinstance(answer, BaseException):
                faults[f"{host}:{port}"] = answer
                continue
            addresses = dict.fromkeys(str(one[4][0]) for one in answer)
            places += [Place(url, host, port, address) for address in addresses]
        return places, faults

    async def _probe(self, place: Place) -> RedisClient:
        """Return a client for a place, once it has accepted a write."""
        secure = "connection_class" in place.url
        pool = ConnectionPool(
            **{
                **place.url,
                **self._arguments,
                **(self._tls if secure else {}),
                "connection_class": _DialledTLS if secure else _Dialled,
                "dialled": place.address,
            }
        )
        plain = Redis.from_pool(pool)
        client = RedisClient(plain, plain)
        try:
            async with asyncio.timeout(self._timeout_s):
                mode = await _mode(plain)
                if mode == "sentinel":
                    raise UsageError(
                        f"{place} is a Sentinel: name the servers that it watches, "
                        "redis://HOST:6379,HOST:6379; kvwire finds the primary"
                    )
                if mode == "cluster":
                    client.commands = await self._cluster(place)
                else:
                    await _write(plain, self._key)
        except TimeoutError:
            await client.close()
            late = f"{place}: no answer within {self._timeout_s:g} s"
            raise TimeoutError(late) from None
        except exceptions.ResponseError as exc:
            await client.close()
            text = printable(str(exc))
            if "db" in place.url and re.search("DB index|SELECT", text):
                raise UsageError(f"{place}: {text}") from None
            raise
        except exceptions.ConnectionError as exc:
            await client.close()
            for words, remedy in _HUNG_UP.items():
                if re.search(words, str(exc)):
                    raise exceptions.ConnectionError(f"{exc}; {remedy}") from None
            raise
        except BaseException:
            await client.close()
            raise
        return client

    async def _cluster(self, place: Place) -> RedisCluster:
        """Return a client for a node's cluster, with its slots."""
        secure = "connection_class" in place.url
        cluster: RedisCluster = RedisCluster(
            # The certificate has to name the host.
            host=place.host if secure else place.address,
            port=place.port,
            ssl=secure,
            require_full_coverage=False,
            # It would close connections that other calls use.
            reinitialize_steps=0,
            username=place.url.get("username"),
            password=place.url.get("password"),
            **self._arguments,
            **(self._tls if secure else {}),
        )
        try:
            await cluster.initialize()
        except BaseException:
            await run_to_completion(_closed(cluster))
            raise
        self._nodes = [
            place.url | {"host": node.host, "port": int(node.port)}
            for node in cluster.get_nodes()
        ]
        return cluster


class _Dialled(Connection):
    """Dials one address of a host; the certificate has to name the host."""

    def __init__(self, *, dialled: str, **arguments: Any) -> None:
        self._dialled = dialled
        super().__init__(**arguments)

    def _connection_arguments(self) -> Mapping[str, Any]:
        arguments = {**super()._connection_arguments(), "host": self._dialled}
        if "ssl" in arguments:
            arguments["server_hostname"] = self.host
        return arguments


class _DialledTLS(_Dialled, SSLConnection):
    """Dials one address of a host with TLS."""


async def _mode(client: Redis) -> str:
    """Return how a server runs: standalone, cluster or sentinel; empty if unknown.

    Every user may send HELLO. A server that does not know HELLO, but answers PING,
    counts as standalone. A replica already fails here, because some users may not try a
    write, and some replicas accept writes that no other server receives.
    """
    try:
        ask: Any = client.execute_command  # it is untyped
        answer = await ask("HELLO")
    except (exceptions.ResponseError, exceptions.InvalidResponse):
        await client.ping()
        return ""
    if isinstance(answer, list):
        answer = dict(zip(answer[::2], answer[1::2], strict=False))
    facts = answer if isinstance(answer, dict) else {}
    mode = facts.get(b"mode")
    if facts.get(b"role") in (b"replica", b"slave") and mode != b"cluster":
        raise exceptions.ReadOnlyError("the server is a read-only replica")
    return mode.decode() if isinstance(mode, bytes) else ""


async def _write(client: Redis | RedisCluster, key: str) -> None:
    """Remove a key that is never set; raise only errors that concern the server.

    A user without write permission passes, although the server refuses the write.
    """
    try:
        await client.unlink(key)
    except exceptions.ResponseError as exc:
        if of_server(exc):
            raise


async def _given_up(
    trying: Iterable[asyncio.Task[RedisClient]], found: RedisClient | None
) -> None:
    """End all attempts, and close the unused clients."""
    for task in trying:
        await end_task(task)
        if not task.cancelled() and task.exception() is None:
            client = task.result()
            if client is not found:
                await client.close()


async def _closed(client: Redis | RedisCluster) -> None:
    try:
        await client.aclose()
        if isinstance(client, RedisCluster):
            # aclose() alone does nothing after a command that failed.
            await client.nodes_manager.aclose()
            await client.nodes_manager.aclose("startup_nodes")
    except FAULTS as exc:
        logger.debug("closing a connection to Redis: %s", exc)


def _file(what: str, option: str, text: str) -> str:
    """Return the path of a file that an option names."""
    path = local_path(text)
    if not Path(path).is_file():
        raise UsageError(f"{what}: {option}={text!r}: the file does not exist")
    return path


def _hosts_of(what: str, url: str) -> list[dict[str, Any]]:
    """Return a URL's hosts, each as arguments of a connection."""
    given, _, rest = url.partition(":")
    if not rest.startswith("//"):
        raise UsageError(f"{what}: write {given}://HOST:PORT,HOST:PORT")
    rest = rest.removeprefix("//")
    place, slash, path = rest.partition("?")[0].partition("/")
    who, at, hosts = place.rpartition("@")
    scheme = _SCHEMES.get(given, given)
    found: list[dict[str, Any]] = []
    for host in hosts.split(","):
        if not host:
            raise UsageError(f"{what}: write {given}://HOST:PORT,HOST:PORT")
        try:
            parsed: Any = parse_url(f"{scheme}://{who}{at}{host}{slash}{path}")
        except ValueError as exc:
            raise UsageError(f"{what}: {exc}") from None
        if path and "db" not in parsed:
            raise UsageError(f"{what}: /{path} is not a database number")
        found.append(dict(parsed))
    return found


def _worst(faults: Mapping[str, BaseException]) -> BaseException:
    """Return one error for all places; a refusal with a remedy comes first."""
    for fault in faults.values():
        if isinstance(fault, (UsageError, exceptions.AuthenticationError)):
            return fault
    if len(faults) == 1:
        return next(iter(faults.values()))
    texts = []
    for place, fault in faults.items():
        # Name the place only once.
        text = re.sub(_CONNECTING, "", str(fault)).removeprefix(f"{place}: ")
        texts.append(f"{place}: {text or type(fault).__name__}")
    return ConnectionError("; ".join(map(printable, texts)))
