"""A communicator: one identity, its listeners and connections, all on one loop."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Generator, Iterable
from dataclasses import replace
from typing import Any, Self

from kvwire.backend import API_VERSION, Backend, Link, Listener, registry
from kvwire.backend.selection import control_refusal, local_refusal, wishes
from kvwire.clock import at_most, yields_before_raising
from kvwire.config import Config
from kvwire.connection import Connection
from kvwire.driver.acceptor import Acceptor
from kvwire.driver.buffers import BufferTable
from kvwire.driver.checksums import ChecksumPolicy
from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.driver.counters import Counters
from kvwire.driver.devices import Devices
from kvwire.driver.handshake import HandshakeDriver, hands_shaken, report_of
from kvwire.driver.reconnect import Reconnector
from kvwire.endpoint.observers import Observers
from kvwire.endpoint.verbs import PublishExpect
from kvwire.errors import (
    BackendUnavailable,
    ClosedOK,
    ConnectError,
    ConnectionClosed,
    ConnectionLost,
    ListenError,
    UsageError,
)
from kvwire.limits import CLOSE_SLACK_S, SPAN_BYTES_MAX
from kvwire.memory.buffers import as_payload
from kvwire.proto.agreement import Agreement, Identity
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.handshake import ClientHandshake
from kvwire.proto.regions import RegionRecord, RegionTable
from kvwire.region import Region
from kvwire.security.keys import crosses_hosts, load_keys, resolve
from kvwire.security.tls import CredentialFiles
from kvwire.transfers.event_wait import fired
from kvwire.transfers.incoming import IncomingState
from kvwire.transfers.matching import TransferRegistry
from kvwire.transfers.outgoing import OutgoingState
from kvwire.types import Access, Address
from kvwire.wire.control import BackendOffer, TransportOffer
from kvwire.wire.handshake_messages import NONCE_BYTES, ConnectionParameters

logger = logging.getLogger("kvwire")


class open:  # noqa: A001, N801 - `kvwire.open` is the public name, and reads as a call
    """Open a communicator: ``await kvwire.open(...)``, or ``async with``.

    Args:
        config: A Config, the path of a TOML file, or None for the environment alone.
        **arguments: Keys of Config that override it, such as ``name="decode-0"``.

    Attributes:
        config: What they come to.

    Raises:
        UsageError: The configuration cannot be used.

    Cancel safety: safe, opening does not wait for anything.
    """

    def __init__(
        self,
        config: Config | str | os.PathLike[str] | None = None,
        **arguments: Any,
    ) -> None:
        if isinstance(config, Config):
            # Checked here, since a Config that was made by hand has not been.
            self.config = config.replace(**arguments)
        else:
            self.config = Config.load(config, **arguments)
        self._communicator: Communicator | None = None

    def __await__(self) -> Generator[Any, Any, Communicator]:
        return self._open().__await__()

    async def __aenter__(self) -> Communicator:
        """The communicator; it is closed at the end of the block."""
        self._communicator = await self._open()
        return self._communicator

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Close it, or abort if the block was left by an exception."""
        assert self._communicator is not None
        if error is not None:
            self._communicator.abort()
        await self._communicator.close()

    @yields_before_raising
    async def _open(self) -> Communicator:
        return Communicator(self.config)


class Communicator(PublishExpect):
    """Connects to peers and is connected to. Made by :func:`kvwire.open`.

    Attributes:
        config: Its configuration.
        buffers: The memory its users have lent it.
        counters: What has happened so far.
        devices: The devices that some of that memory belongs to.
        watchers: Who is told when KV transfers begin and end.
    """

    def __init__(self, config: Config) -> None:
        trust, psk, keys = load_keys(config)
        self._tls = CredentialFiles(config) if config.trust == "mtls" else None
        if not config.name:
            config = config.replace(name=f"{socket.gethostname()}:{os.getpid()}")
        self.config = config
        self.buffers = BufferTable()
        self.counters = Counters()
        self.watchers = Observers()
        self.loop = asyncio.get_running_loop()
        self.devices = Devices(self.loop, max(config.chunk_bytes, SPAN_BYTES_MAX))
        self.exchange = TransferRegistry()
        self.recovery = Reconnector(self)
        self._reception = Acceptor(self)
        self.identity = Identity(
            name=config.name,
            incarnation=secrets.token_bytes(16),
            trust=trust,
            psk=psk,
            keys=keys,
            terms=ConnectionParameters(
                chunk_bytes=config.chunk_bytes,
                eager_bytes=config.eager_bytes,
                window_bytes=config.window_bytes,
                window_messages=config.window_messages,
            ),
            profile=tuple(sorted(config.profile.items())),
        )
        self._regions = RegionTable()
        self._backends: dict[str, Backend] = {}
        self._listeners: list[Listener] = []
        self._pumps: set[ConnectionDriver] = set()
        self._connections: set[Connection] = set()
        self._closed = False
        # No link is made or taken any more, not even to say a last word.
        self._links_ended = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._connections)} connections"
        return (
            f"<Communicator {self.config.name!r}, trust {self.config.trust}, {state}>"
        )

    @property
    def incarnation(self) -> bytes:
        """16 random bytes; a peer sees from them that this is a new start."""
        return self.identity.incarnation

    @property
    def name(self) -> str:
        """The name that peers see."""
        return self.config.name

    @property
    def closed(self) -> bool:
        """Whether it is closing, or closed."""
        return self._closed

    @property
    def links_ended(self) -> bool:
        """Whether it makes and takes no links any more, for nothing."""
        return self._links_ended or (self._closed and not self.exchange.unsaid)

    # --- connections ------------------------------------------------------------------

    @yields_before_raising
    async def listen(self, address: str | Address) -> Address:
        """Accept connections on an address; they come out of :meth:`connections`.

        Args:
            address: ``"host:port"`` or ``"scheme://..."``; port 0 takes any free one.

        Returns:
            The bound address, with the real port.

        Raises:
            UsageError: The address cannot be used, or needs a trust mode.
            BackendUnavailable: Its transport is not installed, or ruled out by config.
            ListenError: It is taken, or not of this host. It is an OSError as well.

        Cancel safety: safe, nothing stays bound.
        """
        self._check_open()
        where = Address.parse(address)
        backend = self._backend(where.scheme, self.config)

        def accept(link: Link) -> None:
            self._reception.accept(link, backend)

        try:
            where = await self._resolved(where, backend)
            listener = await backend.listen(where, accept)
        except OSError as exc:
            raise ListenError(
                f"cannot listen on {where}: {exc.strerror or exc}",
                address=str(where),
                errno=exc.errno,
            ) from exc
        if self._closed:
            await listener.close()
            raise ClosedOK("the communicator was closed")
        self._listeners.append(listener)
        return listener.address

    @yields_before_raising
    async def connect(
        self,
        address: str | Address,
        *,
        transport: str | Iterable[str] | None = None,
        timeout_s: float | None = None,
    ) -> Connection:
        """Connect to a communicator that listens.

        Args:
            address: Where it listens.
            transport: Require one, or one of several in order of preference.
            timeout_s: Until the connection is usable; None for the configured
                ``handshake_timeout_s``.

        Raises:
            UsageError: The address cannot be used, or needs a trust mode.
            BackendUnavailable: No required transport can run here.
            HandshakeError: The sides do not agree; names the fields.
            ConnectionClosed: The peer ended the connection during the handshake.
            ConnectError: Nobody listens there, or it cannot be reached. It is an
                OSError as well.

        Cancel safety: safe, a half-made connection is aborted.
        """
        self._check_open()
        connection = await self._connect(address, transport, timeout_s)
        self.exchange.reattach(connection)
        return connection

    async def redial(self, lost: Connection) -> Connection:
        """Connect again to where a lost connection went, and take its place.

        Raises:
            KVWireError: As :meth:`connect`.

        Cancel safety: safe, a half-made connection is aborted.
        """
        assert lost.dialled is not None
        address, transport = lost.dialled
        connection = await self._connect(address, transport, None, lost.digest)
        self.exchange.reattach(connection)
        return connection

    async def _connect(
        self,
        address: str | Address,
        transport: str | Iterable[str] | None,
        timeout_s: float | None,
        resumes: bytes = b"",
    ) -> Connection:
        config = wishes(self.config, transport)
        where = Address.parse(address)
        backend = self._backend(where.scheme, config)
        timeout_s = config.handshake_timeout_s if timeout_s is None else timeout_s
        handshake = ClientHandshake(
            self.identity,
            secrets.token_bytes(NONCE_BYTES),
            _offer(self.identity, config, where.scheme, resumes),
        )
        opening = HandshakeDriver(handshake, config, where.scheme, self.loop)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                where, link = await self._dial(where, backend)
                pump = self.open_link(link, opening)
                connection = await hands_shaken(pump, opening)
                await _lanes_up(connection, config.lanes)
        except TimeoutError:
            if not limit.expired():
                raise
            raise opening.timed_out(timeout_s) from None
        except ConnectionLost:
            self._check_open()
            raise
        connection.dialled = (where, transport)
        return connection

    async def _dial(self, address: Address, backend: Backend) -> tuple[Address, Link]:
        """Open a link to an address; returns the numeric address too.

        Raises:
            ConnectError: Nobody listens there, or it cannot be reached.

        Cancel safety: safe, nothing stays open.
        """
        try:
            address = await self._resolved(address, backend)
            return address, await backend.connect(address)
        except OSError as exc:
            raise ConnectError(
                f"cannot connect to {address}: {exc.strerror or exc}",
                address=str(address),
                errno=exc.errno,
            ) from exc

    async def _resolved(self, address: Address, backend: Backend) -> Address:
        if crosses_hosts(backend):
            return await resolve(address, self.identity.trust)
        return address

    @property
    def live_connections(self) -> tuple[Connection, ...]:
        """The connections that have not ended; a snapshot."""
        return tuple(self._connections)

    def connections(self) -> AsyncIterator[Connection]:
        """Inbound connections, in the order their handshakes ended.

        Ends when the communicator is closed. Several tasks may iterate; each
        connection goes to one of them.

        Cancel safety: safe, no connection is lost, and the iterator can be used again.
        """
        return self._reception.inbound

    @yields_before_raising
    async def accept(self) -> Connection:
        """The next inbound connection.

        Raises:
            ClosedOK: The communicator was closed.

        Cancel safety: safe, no connection is lost.
        """
        return await self._reception.inbound.take()

    # --- memory -----------------------------------------------------------------------

    def register(self, buffer: Any, access: str | Access = "read") -> Region:
        """Lend memory that peers may reach, each with a grant.

        Args:
            buffer: Contiguous memory, or fragments; writable if it may be put into.
            access: ``"read"`` lets peers get, ``"write"`` put, ``"readwrite"`` both.

        Raises:
            UsageError: The memory cannot be used.
        """
        self._check_open()
        allowed = Access.parse(access)
        payload = as_payload(buffer, writable=bool(allowed & Access.WRITE))
        lent = self.buffers.lend(payload)
        try:
            core = self._regions.register(lent, payload.nbytes, allowed)
        except UsageError:
            self.buffers.holds.retire(lent)
            self.buffers.collect()
            raise
        return Region(self, core)

    def revoke_region(self, core: RegionRecord) -> None:
        """See :meth:`kvwire.Region.revoke`."""
        self._regions.revoke(core)
        for connection in list(self._connections):
            connection.region_revoked(core)

    def close_region(self, core: RegionRecord) -> None:
        """See :meth:`kvwire.Region.close`."""
        if not core.open:
            return
        self._regions.close(core)
        for connection in list(self._connections):
            connection.region_revoked(core)
        self.buffers.holds.retire(core.buffer)
        self.buffers.collect()

    # --- KV transfers -----------------------------------------------------------------

    @property
    def communicator(self) -> Communicator:
        """See Offering."""
        return self

    def start(self, end: IncomingState | OutgoingState) -> None:
        """See Offering."""
        self._check_open()
        self.exchange.offer(end)

    @yields_before_raising
    async def fired(self, event: Any) -> None:
        """Wait until an event on a stream of a GPU has fired; the stream does not wait.

        For blocks that kernels still read when ``pull`` or ``expect`` wants them: those
        write from streams of their own.

        Args:
            event: Of torch or CuPy, recorded behind the kernels.

        Raises:
            UsageError: It is no such event.
            BackendUnavailable: Its GPU has failed, or does not work.
            ClosedOK: The communicator is closed.

        Cancel safety: safe, it only watches.
        """
        self._check_open()
        await fired(event, self.devices)

    @property
    def quarantined_bytes(self) -> int:
        """Bytes whose request is over while a transport may still touch them."""
        return self.buffers.quarantined_bytes

    # --- the end ----------------------------------------------------------------------

    async def close(self) -> None:
        """Close every listener and connection, gracefully; at most ``close_timeout_s``.

        A producer whose transfer is settled here, and whose link was lost before it
        knew, is told so over another link within that time.

        A transport that cannot say by then that it touches no memory any more is left
        alone with it, and an error is logged: that memory stays in quarantine.

        Cancel safety: safe. What has begun to close goes on; call it again for the
        rest.
        """
        self._stop()
        if self.links_ended:
            await self._end_links()
        self.exchange.closing()
        patience_s = self.config.close_timeout_s + CLOSE_SLACK_S
        closing = [c.close() for c in self._connections]
        await at_most(patience_s, [self.exchange.all_said(), *closing])
        await self._end_links()
        # Those that were made to say a last word.
        await at_most(CLOSE_SLACK_S, [c.close() for c in self._connections])
        self.exchange.stop(ClosedOK("the communicator was closed"))
        for pump in self._pumps:
            pump.link.abort()
        if self._pumps:
            await asyncio.wait([p.ended for p in self._pumps], timeout=patience_s)
        if self._pumps:
            logger.error(
                "%d connections have transports that may still touch memory; %d bytes "
                "of it stay in quarantine",
                len(self._pumps),
                self.quarantined_bytes,
            )
        await self._reception.close()
        self.devices.close()
        for backend in self._backends.values():
            await backend.aclose()

    def abort(self) -> None:
        """End every connection now. Never raises; ``close`` waits for what is left."""
        self._stop()
        self._links_ended = True
        for connection in list(self._connections):
            connection.abort("the communicator was aborted")

    async def __aenter__(self) -> Self:
        """The communicator itself; it is closed at the end of the block."""
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Close it, or abort if the block was left by an exception."""
        if error is not None:
            self.abort()
        await self.close()

    def connection_ended(self, connection: Connection, error: ConnectionClosed) -> None:
        """A connection has ended, for the reason given."""
        self._connections.discard(connection)
        if not isinstance(error, ClosedOK):
            logger.info("connection to %s ended: %s", connection.peer, error)
            self.counters.connections_lost += 1
            if not self.links_ended:
                self.recovery.lost(connection)

    # --- inside -----------------------------------------------------------------------

    def _stop(self) -> None:
        if not self._closed:
            self._closed = True
            self._reception.inbound.close()

    async def _end_links(self) -> None:
        """Make and take no links any more."""
        self._links_ended = True
        await self.recovery.close()
        for listener in self._listeners:
            await listener.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedOK("the communicator is closed")

    def _backend(self, scheme: str, config: Config) -> Backend:
        reason = control_refusal(config, scheme)
        if reason:
            raise BackendUnavailable(f"transport {scheme!r}: {reason}")
        return self.lane_backend(scheme)

    def lane_backend(self, name: str) -> Backend:
        """The backend called ``name``, of which there is one for all connections.

        Raises:
            BackendUnavailable: It is not installed.
        """
        if name not in self._backends:
            backend = registry.load(name)()
            if self._tls is not None and backend.capabilities.tls:
                backend.use_tls(self._tls)
            self._backends[name] = backend  # bounded: BACKENDS_MAX
        return self._backends[name]

    def open_link(self, link: Link, opening: HandshakeDriver) -> ConnectionDriver:
        """Start a link; when the handshake on it has ended, it has a connection."""
        pump = ConnectionDriver(
            link,
            self.buffers,
            self.loop,
            checks=ChecksumPolicy(self.config.checksum),
        )
        self._pumps.add(pump)
        pump.ended.add_done_callback(lambda _: self._pumps.discard(pump))

        def agreed(agreement: Agreement) -> Connection:
            return self._begin(pump, opening, agreement)

        pump.open(opening, agreed)
        if self.links_ended:
            link.abort()
        return pump

    def _begin(
        self, pump: ConnectionDriver, opening: HandshakeDriver, agreement: Agreement
    ) -> Connection:
        core = ConnectionCore(
            agreement,
            opening.handshake.framing,
            self.buffers.holds,
            terms=self.identity.terms,
            ping_interval_s=self.config.ping_interval_s,
            ping_misses=self.config.ping_misses,
            now=self.loop.time(),
        )
        connection = Connection(
            self,
            pump,
            core,
            peer=replace(
                agreement.peer,
                address=pump.link.remote_address,
                identity=opening.identity,
            ),
            report=report_of(agreement.choice),
            scheme=opening.scheme,
        )
        self._connections.add(connection)
        self.counters.connections += 1
        return connection


async def _lanes_up(connection: Connection, count: int) -> None:
    """Wait for the transport of the data; without it there is no connection."""
    try:
        await connection.raising.raise_lanes(count)
    except BaseException as exc:
        connection.abort(str(exc) or "no transport for the data came up")
        raise


def _offer(
    identity: Identity, config: Config, scheme: str, resumes: bytes
) -> TransportOffer:
    return TransportOffer(
        name=identity.name,
        backends=tuple(
            BackendOffer(name, API_VERSION)
            for name in registry.names()
            if not local_refusal(config, name, scheme)
        ),
        profile=identity.profile,
        resumes=resumes,
    )
