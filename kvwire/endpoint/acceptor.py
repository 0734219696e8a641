"""Inbound links: the handshake with an unknown peer, and its limits.

A stranger costs one link, one task and a deadline. Pending handshakes are bounded, and
so are connections that nobody takes: both would otherwise grow with what strangers do.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Any, Final

from kvwire.aio import start_task
from kvwire.backend import Backend, Link
from kvwire.driver.handshake import HandshakeDriver
from kvwire.endpoint.accept_queue import AcceptQueue
from kvwire.endpoint.limits import (
    PENDING_HANDSHAKES_MAX,
    REFUSED_HOSTS_MAX,
    REFUSED_LOG_S,
)
from kvwire.errors import AuthenticationFailed, KVWireError
from kvwire.proto.handshake import ServerHandshake
from kvwire.security.keys import crosses_hosts
from kvwire.types import Address, TrustMode, is_loopback
from kvwire.wire.handshake_messages import NONCE_BYTES

if TYPE_CHECKING:
    from kvwire.endpoint.communicator import CommunicatorState
    from kvwire.endpoint.connection import ConnectionState

logger: logging.Logger = logging.getLogger("kvwire.connections")

# Fields of an error that is about a key or a certificate.
_KEYS: Final = frozenset({"psk_file", "tls_ca_file", "tls_cert_file", "tls_peers"})


class Acceptor:
    """Turns the inbound links of a communicator into connections.

    Attributes:
        inbound: The connections that nobody has taken.
    """

    def __init__(self, communicator: CommunicatorState) -> None:
        self.inbound: AcceptQueue[Any] = AcceptQueue()
        self._communicator = communicator
        # Links that are not a connection: not yet, or never and on their way out.
        # Oldest first.
        self._pending: dict[HandshakeDriver[ConnectionState], None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Hosts with a recent warning, and when their next refusal is one again.
        self._quiet_until: dict[str, float] = {}

    def accept(self, link: Link, backend: Backend) -> None:
        """Shake hands with a link that came in, in a task of its own."""
        communicator = self._communicator
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
        opening = communicator.open_link(
            link,
            ServerHandshake(communicator.identity, secrets.token_bytes(NONCE_BYTES)),
            communicator.config,
            backend.scheme,
            busy=self._busy(),
        )
        self._pending[opening] = None  # bounded: PENDING_HANDSHAKES_MAX
        opening.ended.add_done_callback(lambda _: self._pending.pop(opening, None))
        task = start_task(self._welcome(opening))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for what is under way, once every link has ended.

        Cancel safety: safe, call it again.
        """
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _welcome(self, opening: HandshakeDriver[ConnectionState]) -> None:
        communicator, remote = self._communicator, opening.link.remote_address
        timeout_s = communicator.config.handshake_timeout_s
        # Not cancelled by a timeout: what has ended at the last moment has ended.
        await asyncio.wait([opening.done], timeout=timeout_s)
        if not opening.done.done():
            logger.info("%s: %s", remote, opening.timeout(timeout_s))
            opening.done.cancel()
            opening.link.abort()
            return
        try:
            connection = opening.done.result()
        except KVWireError as exc:
            logger.log(self._level(exc, remote), "%s: refused: %s", remote, exc)
            return
        try:
            async with asyncio.timeout(timeout_s):
                await connection.driver.lane_setup.wait_initial_set()
        except TimeoutError:
            connection.abort(f"no transport for the data within {timeout_s:g} s")
            return
        resumes = connection.core.agreement.offer.resumes
        if resumes:
            communicator.recovery.taken_over(connection, resumes)
        else:
            communicator.registry.reattach(connection)
            if not communicator.closed:
                self.inbound.put(connection.public)

    def _level(self, error: KVWireError, remote: Address | None) -> int:
        """Return how loudly to log a refusal: a wrong key is an operator's business.

        A host that keeps trying gives one warning per interval; a stranger that speaks
        another protocol gives none.
        """
        if not isinstance(error, AuthenticationFailed) or not _KEYS & {*error.fields}:
            return logging.INFO
        now, host = self._communicator.loop.time(), remote.host if remote else ""
        if now < self._quiet_until.get(host, now):
            return logging.INFO
        if len(self._quiet_until) >= REFUSED_HOSTS_MAX:
            self._quiet_until.clear()
        self._quiet_until[host] = now + REFUSED_LOG_S  # bounded: REFUSED_HOSTS_MAX
        return logging.WARNING

    def _why_not(self, link: Link, backend: Backend) -> str:
        """Return why a link is refused before a handshake; "" if it is not."""
        remote = link.remote_address
        if self._communicator.links_ended:
            return "the communicator is closed"
        proves_nothing = self._communicator.identity.trust is TrustMode.LOOPBACK
        if remote is None or not proves_nothing or not crosses_hosts(backend):
            return ""
        if not is_loopback(remote.host):
            return 'it is on another host, and trust is "loopback"'
        return ""

    def _busy(self) -> str:
        """Return why there is no room for another connection; "" if there is."""
        limit = self._communicator.config.connections_max
        if len(self._communicator.live_connections) >= limit:
            return f"connections_max={limit} are open"
        if len(self.inbound) >= limit:
            return f"connections_max={limit} wait to be taken"
        return ""
