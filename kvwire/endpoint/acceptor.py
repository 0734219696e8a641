"""Inbound links: the handshake with an unknown peer, and its limits.

An unknown peer costs one link, one task and a deadline. The numbers of pending
handshakes and of connections waiting to be accepted are limited, because unknown peers
can drive up both.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from kvwire.aio import start_task, unusable, yields_before_raising
from kvwire.backend import Backend, LaneArrived, Link, Listener
from kvwire.backend.selection import crosses_hosts
from kvwire.driver.handshake import HandshakeDriver
from kvwire.endpoint.connection import Connection
from kvwire.endpoint.dialling import listen_on_all
from kvwire.endpoint.links import Links
from kvwire.endpoint.reconnect import Reconnector
from kvwire.errors import AuthenticationFailed, ClosedOK, KVWireError, ListenError
from kvwire.proto.handshake import ServerHandshake
from kvwire.types import Address, TrustMode, is_loopback
from kvwire.wire.handshake_messages import NONCE_BYTES

# The most pending handshakes on one listener. At 32 KiB each
# (tests/fault/test_strangers.py), unknown peers occupy at most 8 MiB together.
PENDING_HANDSHAKES_MAX: Final = 256
# How often refusing a host for its key is logged as a WARNING; refusals in between are
# INFO.
REFUSED_LOG_S: Final = 60.0
REFUSED_HOSTS_MAX: Final = 256

logger: logging.Logger = logging.getLogger("kvwire.connections")

# Fields of an error that is about a key or a certificate.
_KEYS: Final = frozenset({"psk_file", "tls_ca_file", "tls_cert_file", "tls_peers"})


class Acceptor:
    """Turns the inbound links of a communicator into connections.

    Attributes:
        inbound: The connections waiting to be accepted.
        listeners: The open listeners, oldest first.
    """

    def __init__(self, links: Links, recovery: Reconnector) -> None:
        self.inbound: AcceptQueue = AcceptQueue()
        self.listeners: list[Listener] = []
        self._links = links
        self._recovery = recovery
        # Links that are not connections: still in the handshake, or refused and
        # closing. Oldest first.
        self._pending: dict[HandshakeDriver[Connection], None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Hosts that a recent warning named, each with the time from which a refusal is
        # a warning again.
        self._quiet_until: dict[str, float] = {}

    @yields_before_raising
    async def listen(self, address: str | Address) -> Address:
        """Accept connections on an address; see Communicator.listen.

        Cancel safety: safe, nothing stays bound.
        """
        links = self._links
        links.check_open()
        where = Address.parse(address)
        selection = links.services.selection(where.scheme)
        backend = links.services.backend(where.scheme)
        if links.services.tls is not None:
            links.services.tls.check_may_listen()
        # Loads the backends' libraries now instead of during a peer's handshake.
        selection.offered  # noqa: B018
        accept = partial(self.accept, backend=backend)
        try:
            listeners = await listen_on_all(
                where, backend, links.identity.trust, accept
            )
        except OSError as exc:
            raise ListenError(
                f"cannot listen on {where}: {exc.strerror or exc}",
                address=str(where),
                errno=exc.errno,
            ) from exc
        if links.closed:
            for listener in listeners:
                await listener.close()
            raise ClosedOK("the communicator was closed")
        self.listeners.extend(listeners)
        return listeners[0].address

    def accept(self, link: Link, backend: Backend) -> None:
        """Start the handshake of an inbound link, in a separate task."""
        links = self._links
        reason = self._why_not(link, backend)
        if reason:
            logger.info("%s: not accepted: %s", link.remote_address, reason)
            link.abort()
            return
        if len(self._pending) >= PENDING_HANDSHAKES_MAX:
            # An honest handshake takes milliseconds: the oldest is the most suspect.
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.link.abort()
        opening = links.open(
            link,
            ServerHandshake(links.identity, secrets.token_bytes(NONCE_BYTES)),
            links.services.selection(backend.scheme),
            busy=self._busy(),
        )
        self._pending[opening] = None  # bounded: PENDING_HANDSHAKES_MAX
        opening.ended.add_done_callback(lambda _: self._pending.pop(opening, None))
        task = start_task(self._welcome(opening))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for the running handshakes, once every link has ended.

        Cancel safety: safe, call it again.
        """
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _welcome(self, opening: HandshakeDriver[Connection]) -> None:
        remote = opening.link.remote_address
        timeout_s = self._links.services.config.handshake_timeout_s
        # Not cancelled by a timeout, so a handshake that ends at the last moment
        # counts.
        await asyncio.wait([opening.done], timeout=timeout_s)
        if not opening.done.done():
            logger.info("%s: %s", remote, opening.timeout(timeout_s))
            opening.done.cancel()
            opening.link.abort()
            return
        try:
            connection = opening.done.result()
        except LaneArrived as exc:
            logger.debug("%s: %s", remote, exc)
            return
        except KVWireError as exc:
            logger.log(self._level(exc, remote), "%s: refused: %s", remote, exc)
            return
        try:
            await connection._driver.lane_setup.wait_initial_set()
        except TimeoutError:
            connection.abort(f"no transport for the data within {timeout_s:g} s")
            return
        resumes = connection._core.agreement.offer.resumes
        if resumes:
            self._recovery.taken_over(connection, resumes)
        else:
            self._links.services.registry.reattach(connection._driver)
            if not self._links.closed:
                self.inbound.put(connection)

    def _level(self, error: KVWireError, remote: Address | None) -> int:
        """Return the log level for a refusal: a warning only for a wrong key.

        If a host keeps trying with a wrong key, one warning is logged per interval;
        clients that speak another protocol cause none.
        """
        if not isinstance(error, AuthenticationFailed) or not _KEYS & {*error.fields}:
            return logging.INFO
        now = self._links.services.loop.time()
        host = remote.host if remote else ""
        if now < self._quiet_until.get(host, now):
            return logging.INFO
        if len(self._quiet_until) >= REFUSED_HOSTS_MAX:
            self._quiet_until.clear()
        self._quiet_until[host] = now + REFUSED_LOG_S  # bounded: REFUSED_HOSTS_MAX
        return logging.WARNING

    def _why_not(self, link: Link, backend: Backend) -> str:
        """Return why a link is refused before its handshake, or ""."""
        remote = link.remote_address
        if self._links.ended:
            return "the communicator is closed"
        proves_nothing = self._links.identity.trust is TrustMode.LOOPBACK
        if remote is None or not proves_nothing or not crosses_hosts(backend):
            return ""
        if not is_loopback(remote.host):
            return 'it is on another host, and trust is "loopback"'
        return ""

    def _busy(self) -> str:
        """Return why no more connections are accepted, or ""."""
        limit = self._links.services.config.connections_max
        if len(self._links.connections) >= limit:
            return f"connections_max={limit} are open"
        if len(self.inbound) >= limit:
            return f"connections_max={limit} connections wait to be accepted"
        return ""


@unusable(
    "write `async for connection in comm.connections()`",
    "__iter__",
    "__next__",
    "__await__",
)
class AcceptQueue(AsyncIterator[Connection]):
    """Holds inbound connections until they are accepted; iterate it to accept them.

    Any number of tasks may iterate at once, and each connection goes to one of them. A
    connection that ended while it was queued is handed out too, because messages that
    its peer sent before closing can still be received.
    """

    def __init__(self) -> None:
        self._waiting: deque[Connection] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        """Return the number of connections waiting to be accepted."""
        return len(self._waiting)

    def put(self, connection: Connection) -> None:
        """Add a connection, and wake the waiting tasks."""
        self._waiting.append(connection)  # bounded: CONNECTIONS_MAX, by the caller
        self._changed.set()

    def close(self) -> None:
        """End every iteration, and drop the waiting connections."""
        self._closed = True
        self._waiting.clear()
        self._changed.set()

    async def take(self) -> Connection:
        """Wait for the next connection.

        Cancel safety: safe, no connection is lost.
        """
        while not self._waiting:
            if self._closed:
                raise ClosedOK("the communicator is closed")
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()

    async def __anext__(self) -> Connection:
        try:
            return await self.take()
        except ClosedOK:
            raise StopAsyncIteration from None
