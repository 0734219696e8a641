"""What is behind a :class:`~kvwire.Communicator`: one identity and its connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from kvwire.aio import LoopThread, at_most, seconds_of, yields_before_raising
from kvwire.backend import API_VERSION, Backend, Link, Listener, registry
from kvwire.backend.selection import (
    apply_overrides,
    check_transports,
    control_rejection,
    offered,
)
from kvwire.config import Config
from kvwire.directory import Record, Selector
from kvwire.directory.dialable import check_dialable
from kvwire.driver.buffers import BufferTable
from kvwire.driver.codec_threads import CodecThreads
from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.driver.counters import Counters
from kvwire.driver.devices import Devices
from kvwire.driver.handshake import HandshakeDriver, report_of
from kvwire.driver.trace_ring import TraceRing
from kvwire.endpoint.acceptor import Acceptor
from kvwire.endpoint.connection import ConnectionState, Dialled
from kvwire.endpoint.dialling import Dialling, listen_on_all
from kvwire.endpoint.inspector import Inspector
from kvwire.endpoint.limits import PEERS_MAX
from kvwire.endpoint.membership import Membership
from kvwire.endpoint.observers import Observers, TransferLog, transfers_logger
from kvwire.endpoint.peer import PeerState
from kvwire.endpoint.reconnect import Reconnector
from kvwire.endpoint.snapshot import (
    Snapshot,
    TransferSnapshot,
    snapshot_of,
    transfer_snapshots,
)
from kvwire.errors import (
    BackendUnavailable,
    ClosedOK,
    ConnectError,
    ConnectionClosed,
    ConnectionLost,
    HandshakeError,
    KVWireError,
    ListenError,
    ProtocolError,
    UsageError,
    wrong_type,
)
from kvwire.limits import CLOSE_SLACK_S, SPAN_BYTES_MAX
from kvwire.memory.buffers import as_payload
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.handshake import (
    OWN_INCARNATION,
    Agreement,
    ClientHandshake,
    Handshake,
    Identity,
)
from kvwire.proto.regions import RegionRecord, RegionTable
from kvwire.security.keys import load_keys
from kvwire.security.tls import CredentialFiles
from kvwire.security.validity import Validity
from kvwire.transfers.event_wait import wait_event
from kvwire.transfers.incoming import IncomingState
from kvwire.transfers.matching import TransferRegistry
from kvwire.transfers.outgoing import OutgoingState
from kvwire.types import Access, AccessName, Address
from kvwire.wire.control import BackendOffer, TransportOffer
from kvwire.wire.handshake_messages import NONCE_BYTES, ConnectionParameters

logger: logging.Logger = logging.getLogger("kvwire.connections")

E = TypeVar("E", bound=KVWireError)
# What runs a link: first the one, then the other.
Driver = HandshakeDriver[ConnectionState] | ConnectionDriver


class CommunicatorState:
    """Holds the state of one communicator, on the loop it was made on.

    Args:
        config: Its configuration.
        publish_connection: Makes the object that users hold of a connection.

    Attributes:
        config: Its configuration.
        buffers: The memory its users have lent it.
        counters: What has happened so far.
        devices: The devices that some of that memory belongs to.
        codec_threads: Who encodes and decodes for its transfers.
        membership: What it knows of its directory.
        peers: Those that are known by name.
        thread: Who may call it.
        watchers: Who is told when KV transfers begin and end.
    """

    def __init__(
        self, config: Config, publish_connection: Callable[[ConnectionState], Any]
    ) -> None:
        self.publish_connection = publish_connection
        check_transports(config)
        trust, psk, keys = load_keys(config)
        self._tls = CredentialFiles(config) if config.trust == "mtls" else None
        if not config.name:
            config = config.replace(name=f"{socket.gethostname()}:{os.getpid()}")
        self.config = config
        self.buffers: BufferTable = BufferTable()
        self.counters: Counters = Counters()
        self.watchers: Observers[Any] = Observers()
        if transfers_logger.isEnabledFor(logging.DEBUG):
            self.watchers.add(TransferLog())
        self.thread: LoopThread = LoopThread()
        self.loop: asyncio.AbstractEventLoop = self.thread.loop
        self.inspector: Inspector = Inspector(self)
        # Where events are noted for `kvwire trace`; None where nobody may look in.
        self.ring: TraceRing | None = None
        self.devices: Devices = Devices(
            self.loop, max(config.chunk_bytes, SPAN_BYTES_MAX)
        )
        self.codec_threads: CodecThreads = CodecThreads()
        self.registry: TransferRegistry = TransferRegistry()
        self.recovery: Reconnector = Reconnector(self)
        self.membership: Membership = Membership(config.directory)
        self.peers: dict[str, PeerState] = {}
        self._reception = Acceptor(self)
        self.identity: Identity = Identity(
            name=config.name,
            incarnation=secrets.token_bytes(16),
            trust=trust,
            psk=psk,
            keys=keys,
            parameters=ConnectionParameters(
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
        # Ordered, so that who is asked first does not hang on where objects lie.
        self.drivers: dict[Driver, None] = {}
        self._connections: dict[ConnectionState, None] = {}
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
        """Return 16 random bytes, by which a peer knows this start from others."""
        return self.identity.incarnation

    @property
    def name(self) -> str:
        """Return the name that peers see."""
        return self.config.name

    @property
    def certificate(self) -> Validity | None:
        """Return when the certificate of ``mtls`` mode is valid. From any thread."""
        return None if self._tls is None else self._tls.current().own.validity

    @property
    def closed(self) -> bool:
        """Tell whether it is closing, or closed."""
        return self._closed

    @property
    def links_ended(self) -> bool:
        """Tell whether it makes and takes no links any more, for nothing."""
        return self._links_ended or (self._closed and not self.registry.unsettled)

    # --- connections ------------------------------------------------------------------

    @yields_before_raising
    async def listen(self, address: str | Address) -> Address:
        """Accept connections on an address."""
        self.check_open()
        where = Address.parse(address)
        backend = self._backend(where.scheme, self.config)
        if self._tls is not None:
            self._tls.check_may_listen()
        # Loads their libraries now, and not while a peer waits in its handshake.
        offered(self.config, where.scheme)

        def accept(link: Link) -> None:
            self._reception.accept(link, backend)

        try:
            listeners = await listen_on_all(where, backend, self.identity.trust, accept)
        except OSError as exc:
            raise ListenError(
                f"cannot listen on {where}: {exc.strerror or exc}",
                address=str(where),
                errno=exc.errno,
            ) from exc
        if self._closed:
            for listener in listeners:
                await listener.close()
            raise ClosedOK("the communicator was closed")
        self._listeners.extend(listeners)
        return listeners[0].address

    @yields_before_raising
    async def connect(
        self,
        address: str | Address,
        transport: str | Iterable[str] | None,
        timeout_s: float | None,
    ) -> ConnectionState:
        """Connect to a communicator that listens."""
        self.check_open()
        if isinstance(transport, Iterable) and not isinstance(transport, str):
            transport = tuple(transport)  # a redial reads it again
        connection = await self._connect(address, transport, timeout_s)
        self.registry.reattach(connection)
        return connection

    async def redial(self, lost: ConnectionState) -> ConnectionState:
        """Connect again to where a lost connection went, and take its place.

        Raises:
            KVWireError: As :meth:`connect`.

        Cancel safety: safe, a half-made connection is aborted.
        """
        assert lost.dialled is not None
        name, where, transport = lost.dialled
        try:
            connection = await self._connect(where, transport, None, lost.digest)
        except ConnectError as exc:
            # Refused: the process has ended, and others of that name are others.
            if name == where or isinstance(exc.__cause__, ConnectionRefusedError):
                raise
            connection = await self._connect(name, transport, None, lost.digest)
        assert connection.dialled is not None
        # The next redial may go by the name again.
        connection.dialled = connection.dialled._replace(name=name)
        self.registry.reattach(connection)
        return connection

    async def _connect(
        self,
        address: str | Address,
        transport: str | Iterable[str] | None,
        timeout_s: float | None,
        resumes: bytes = b"",
    ) -> ConnectionState:
        config = apply_overrides(self.config, transport)
        name = where = Address.parse(address)
        backend = self._backend(where.scheme, config)
        if timeout_s is None:
            timeout_s = config.handshake_timeout_s
        timeout_s = seconds_of("timeout_s", timeout_s)
        handshake = ClientHandshake(
            self.identity,
            secrets.token_bytes(NONCE_BYTES),
            _offer(self.identity, config, where.scheme, resumes),
        )
        opening, dialling = None, Dialling(name, backend, self.identity.trust)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                where, link = await dialling.link()
                opening = self.open_link(link, handshake, config, where.scheme)
                connection = await opening.wait_established()
                await _lanes_up(connection, config.lanes)
        except TimeoutError:
            if not limit.expired():
                raise
            if opening is None:
                raise dialling.late(timeout_s) from None
            raise _at(where, opening.timeout(timeout_s)) from None
        except (HandshakeError, ProtocolError, ConnectionLost) as exc:
            self.check_open()
            if getattr(exc, "fields", ()) == (OWN_INCARNATION,):
                raise ConnectError(
                    f"cannot connect to {where}: {exc}",
                    address=str(where),
                    errno=errno.ELOOP,
                ) from exc
            raise _at(where, exc) from None
        connection.dialled = Dialled(name, where, transport)
        return connection

    @property
    def live_connections(self) -> tuple[ConnectionState, ...]:
        """Return the connections that have not ended; a snapshot."""
        return tuple(self._connections)

    def connections(self) -> AsyncIterator[Any]:
        """Iterate inbound connections."""
        return self._reception.inbound

    @yields_before_raising
    async def accept(self) -> Any:
        """Wait for the next inbound connection."""
        return await self._reception.inbound.take()

    async def members(self, selector: str) -> tuple[Record, ...]:
        """Return the members that a selector means, the least busy first."""
        self.check_open()
        found = await self.membership.meant_by(Selector.parse(selector))
        mine = self.incarnation.hex()
        others = [one for one in found if one.key != mine]
        # Of equals each client takes another one first.
        random.shuffle(others)
        return tuple(sorted(others, key=lambda one: one.load))

    def peer(self, where: str | Record) -> PeerState:
        """Name a peer that need not be connected."""
        self.check_open()
        if isinstance(where, Record):
            named = f"incarnation={where.incarnation}"
            where = named if where.incarnation else where.address
        if not isinstance(where, str):
            raise wrong_type(
                "peer", where, 'a text, "host:port" or "role=prefill", or a member'
            )
        if where not in self.peers:
            if len(self.peers) >= PEERS_MAX:
                raise UsageError(
                    f"{len(self.peers)} peers: close() those that are not needed"
                )
            self.peers[where] = PeerState(self, where)  # bounded: PEERS_MAX
        return self.peers[where]

    def announce(self, address: str | Address | None, **fields: Any) -> None:
        """Announce this communicator in its directory."""
        self.check_open()
        if address is None:
            if not self._listeners:
                raise UsageError("announce: listen first, or pass address=")
            address = self._listeners[0].address
        try:
            check_dialable(Address.parse(address))
        except UsageError as exc:
            raise UsageError(
                f"announce: {exc}; pass address=, by which others reach it"
            ) from None
        record = Record(
            name=self.config.name,
            address=str(address),
            incarnation=self.incarnation.hex(),
            transports=offered(self.config, Address.parse(address).scheme),
            **fields,
        )
        self.membership.announce(record)

    # --- memory -----------------------------------------------------------------------

    def register(self, buffer: Any, access: AccessName | Access) -> RegionRecord:
        """Lend memory that peers may reach, each with a grant."""
        self.check_open()
        allowed = Access.parse(access)
        payload = as_payload(buffer, writable=bool(allowed & Access.WRITE))
        lent = self.buffers.lend(payload)
        try:
            return self._regions.register(lent, payload.nbytes, allowed)
        except UsageError:
            self.buffers.holds.retire(lent)
            self.buffers.collect()
            raise

    def revoke_region(self, core: RegionRecord) -> None:
        """End the grants of a region."""
        self._regions.revoke(core)
        for connection in list(self._connections):
            connection.region_revoked(core)

    def close_region(self, core: RegionRecord) -> None:
        """End a region, and wait until nothing can touch its memory."""
        if not core.open:
            return
        self._regions.close(core)
        for connection in list(self._connections):
            connection.region_revoked(core)
        self.buffers.holds.retire(core.buffer)
        self.buffers.collect()

    # --- KV transfers -----------------------------------------------------------------

    @property
    def open_transfers(self) -> int:
        """Count the transfers that have no outcome."""
        return len(self.registry.live)

    def transfers(self) -> tuple[TransferSnapshot, ...]:
        """Show the transfers that are open."""
        return transfer_snapshots(list(self.registry.live))

    def snapshot(self) -> Snapshot:
        """Show what is open."""
        return snapshot_of(self)

    def start(self, end: IncomingState | OutgoingState) -> None:
        """Let a transfer wait for its peer, or meet one that waits."""
        self.check_open()
        self.registry.offer(end)

    @yields_before_raising
    async def fired(self, event: Any) -> None:
        """Wait until an event of a device has fired."""
        self.check_open()
        await wait_event(event, self.devices)

    @property
    def quarantined_bytes(self) -> int:
        """Count the bytes of ended requests that a transport may still touch."""
        return self.buffers.quarantined_bytes

    # --- the end ----------------------------------------------------------------------

    async def close(self) -> None:
        """Close every listener and connection, gracefully."""
        self._stop()
        await self.inspector.close()
        await self.membership.close()
        if self.links_ended:
            await self._end_links()
        self.registry.closing()
        patience_s = self.config.close_timeout_s + CLOSE_SLACK_S
        closing = [c.close() for c in self._connections]
        await at_most(patience_s, [self.registry.all_settled(), *closing])
        await self._end_links()
        # Those that were made to say a last word.
        await at_most(CLOSE_SLACK_S, [c.close() for c in self._connections])
        self.registry.stop(ClosedOK("the communicator was closed"))
        for driver in self.drivers:
            driver.link.abort()
        if self.drivers:
            await asyncio.wait([d.ended for d in self.drivers], timeout=patience_s)
        if self.drivers:
            logger.error(
                "%d connections have transports that may still touch memory; %d bytes "
                "of it stay in quarantine",
                len(self.drivers),
                self.quarantined_bytes,
            )
        await self._reception.close()
        # Transfers that were being decoded have their outcomes after this.
        await self.codec_threads.close()
        self.devices.close()
        for backend in self._backends.values():
            await backend.aclose()

    def abort(self) -> None:
        """End every connection now. Never raises; ``close`` waits for what is left."""
        self._stop()
        self._links_ended = True
        for connection in list(self._connections):
            connection.abort("the communicator was aborted")

    def connection_ended(
        self, connection: ConnectionState, error: ConnectionClosed
    ) -> None:
        """Forget a connection that has ended, and recover it if it was lost."""
        self._connections.pop(connection, None)
        if isinstance(error, ClosedOK):
            logger.debug("connection to %s closed: %s", connection.peer, error)
        else:
            logger.info("connection to %s ended: %s", connection.peer, error)
            self.counters.connections_lost += 1
            if not self.links_ended:
                self.recovery.lost(connection, error)

    # --- inside -----------------------------------------------------------------------

    def _stop(self) -> None:
        if not self._closed:
            self._closed = True
            self._reception.inbound.close()
            for peer in list(self.peers.values()):
                peer.stop()

    async def _end_links(self) -> None:
        """Make and take no links any more."""
        self._links_ended = True
        await self.recovery.close()
        for listener in self._listeners:
            await listener.close()

    def check_open(self) -> None:
        """Refuse what begins something new on a communicator that is closed.

        Raises:
            ClosedOK: It is.
        """
        if self._closed:
            raise ClosedOK("the communicator is closed")

    def _backend(self, scheme: str, config: Config) -> Backend:
        reason = control_rejection(config, scheme)
        if reason:
            raise BackendUnavailable(f"transport {scheme!r}: {reason}")
        return self.lane_backend(scheme)

    def lane_backend(self, name: str) -> Backend:
        """Return the backend called ``name``: one serves all connections.

        Raises:
            BackendUnavailable: It is not installed.
        """
        if name not in self._backends:
            backend = registry.load(name)()
            if self._tls is not None and backend.capabilities.tls:
                backend.use_tls(self._tls)
            self._backends[name] = backend  # bounded: BACKENDS_MAX
        return self._backends[name]

    def open_link(
        self,
        link: Link,
        handshake: Handshake,
        config: Config,
        scheme: str,
        busy: str = "",
    ) -> HandshakeDriver[ConnectionState]:
        """Start a link; when the handshake on it has ended, it has a connection."""
        opening = HandshakeDriver(
            link, handshake, config, scheme, self.loop, agreed=self._begin, busy=busy
        )
        self._add_driver(opening)
        opening.begin()
        if self.links_ended:
            link.abort()
        return opening

    def _add_driver(self, driver: Driver) -> None:
        """Know what runs a link until it has ended."""
        self.drivers[driver] = None  # bounded: CONNECTIONS_MAX, PENDING_HANDSHAKES_MAX
        driver.ended.add_done_callback(lambda _: self.drivers.pop(driver, None))

    def _begin(
        self, opening: HandshakeDriver[ConnectionState], agreement: Agreement
    ) -> ConnectionState:
        core = ConnectionCore(
            agreement,
            opening.handshake.framing,
            self.buffers.holds,
            parameters=self.identity.parameters,
            ping_interval_s=self.config.ping_interval_s,
            ping_misses=self.config.ping_misses,
            now=self.loop.time(),
        )
        connection = ConnectionState(
            self,
            opening.link,
            core,
            peer=replace(
                agreement.peer,
                address=opening.link.remote_address,
                identity=opening.identity,
            ),
            report=report_of(agreement.choice),
            scheme=opening.scheme,
        )
        self._add_driver(connection.driver)
        opening.hand_over(connection.driver)
        self._connections[connection] = None
        logger.debug("connection to %s over %s", connection.peer, opening.scheme)
        self.counters.connections += 1
        return connection


def _at(address: Address, error: E) -> E:
    """Return an error of connecting with the address in its text."""
    error.args = (f"{address}: {error}", *error.args[1:])
    return error


async def _lanes_up(connection: ConnectionState, count: int) -> None:
    """Wait for the transport of the data; without it there is no connection."""
    try:
        await connection.driver.lane_setup.open_lanes(count)
    except BaseException as exc:
        connection.abort(str(exc) or "no transport for the data came up")
        raise


def _offer(
    identity: Identity, config: Config, scheme: str, resumes: bytes
) -> TransportOffer:
    return TransportOffer(
        name=identity.name,
        backends=tuple(BackendOffer(n, API_VERSION) for n in offered(config, scheme)),
        profile=identity.profile,
        resumes=resumes,
    )
