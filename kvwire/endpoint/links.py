"""One communicator's links: dialled or accepted, in a handshake or connected.

A link starts with a handshake. When both sides agree, a :class:`Connection` takes the
link over, within the same call. This module keeps track of each link until it can no
longer touch memory, and decides whether new links may be made.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from kvwire.aio import seconds_of, yields_before_raising
from kvwire.backend import API_VERSION, Link
from kvwire.backend.selection import Selection, apply_overrides
from kvwire.driver.connection_driver import ConnectionDriver
from kvwire.driver.handshake import HandshakeDriver, report_of
from kvwire.driver.lanes.state import LaneSet
from kvwire.endpoint.connection import Connection, Dialled
from kvwire.endpoint.dialling import Dialling
from kvwire.endpoint.windows.window import WindowTable
from kvwire.errors import (
    ClosedOK,
    ConnectError,
    ConnectionClosed,
    ConnectionLost,
    HandshakeError,
    KVWireError,
    ProtocolError,
)
from kvwire.proto.connection import ConnectionCore
from kvwire.proto.handshake import (
    OWN_INCARNATION,
    Agreement,
    ClientHandshake,
    Handshake,
    Identity,
)
from kvwire.proto.regions import RegionRecord, RegionTable
from kvwire.transfers.registry import TransferServices
from kvwire.types import Address
from kvwire.wire.control import BackendOffer, TransportOffer
from kvwire.wire.handshake_messages import NONCE_BYTES

logger: logging.Logger = logging.getLogger("kvwire.connections")

E = TypeVar("E", bound=KVWireError)
# The driver of a link: a handshake's driver first, then a connection's.
Driver = HandshakeDriver[Connection] | ConnectionDriver


class Links:
    """Makes the links of one communicator, and keeps track of them until they end.

    Attributes:
        services: The services that the parts of the communicator share.
        identity: The identity that the communicator proves in each handshake.
        regions: The memory that it has lent to peers.
        windows: The blocks that it exposes to reads without asking.
        drivers: The drivers of its links. They are kept in order, so that the order in
            which they are ended does not depend on object addresses.
        connections: The connections that have not ended, oldest first.
        lost: Called with each connection that ends without having been closed.
        closed: The communicator is closing, or closed: nothing new begins.
    """

    def __init__(self, services: TransferServices, identity: Identity) -> None:
        self.services = services
        self.identity = identity
        self.regions: RegionTable = RegionTable()
        self.windows: WindowTable = WindowTable(services.thread)
        self.drivers: dict[Driver, None] = {}
        self.connections: dict[Connection, None] = {}
        self.lost: Callable[[Connection, ConnectionClosed], None] | None = None
        self.closed: bool = False
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether new links are refused, for any reason."""
        settled = self.services.registry.all_settled
        return self._ended or (self.closed and settled.is_set())

    def end(self) -> None:
        """Refuse new links, dialled or accepted, from now on."""
        self._ended = True

    def check_open(self) -> None:
        """Raise if the communicator is closed.

        Raises:
            ClosedOK: The communicator is closed.
        """
        if self.closed:
            raise ClosedOK("the communicator is closed")

    @yields_before_raising
    async def connect(
        self,
        address: str | Address,
        transport: str | Iterable[str] | None = None,
        timeout_s: float | None = None,
        *,
        answer_s: float | None = None,
    ) -> Connection:
        """Connect to a communicator that listens; see Communicator.connect.

        Args:
            address: Where it listens.
            transport: A required transport, or several in order of preference.
            timeout_s: Seconds until the connection must be usable.
            answer_s: Seconds until the handshake must have ended, if not ``timeout_s``.

        Cancel safety: safe, a half-made connection is aborted.
        """
        self.check_open()
        if isinstance(transport, Iterable) and not isinstance(transport, str):
            transport = tuple(transport)  # a redial reads it again
        connection = await self._connect(address, transport, timeout_s, answer_s)
        self.services.registry.reattach(connection._driver)
        return connection

    async def redial(self, lost: Connection) -> Connection:
        """Dial the peer of a lost connection again; the new connection replaces it.

        Raises:
            KVWireError: As :meth:`connect`.

        Cancel safety: safe, a half-made connection is aborted.
        """
        assert lost._dialled is not None
        name, where, transport = lost._dialled
        try:
            connection = await self._connect(where, transport, resumes=lost._digest)
        except ConnectError as exc:
            # Refused: the process has ended, and the name's other addresses are other
            # processes.
            if name == where or isinstance(exc.__cause__, ConnectionRefusedError):
                raise
            connection = await self._connect(name, transport, resumes=lost._digest)
        assert connection._dialled is not None
        # The next redial may resolve the name again.
        connection._dialled = connection._dialled._replace(name=name)
        self.services.registry.reattach(connection._driver)
        return connection

    async def _connect(
        self,
        address: str | Address,
        transport: str | Iterable[str] | None,
        timeout_s: float | None = None,
        answer_s: float | None = None,
        resumes: bytes = b"",
    ) -> Connection:
        services = self.services
        name = where = Address.parse(address)
        if transport is None:
            selection = services.selection(where.scheme)
        else:
            config = apply_overrides(services.config, transport)
            selection = Selection(config, where.scheme)
            selection.require()
        if timeout_s is None:
            timeout_s = services.config.handshake_timeout_s
        else:
            timeout_s = seconds_of("timeout_s", timeout_s)
        limit_s = timeout_s if answer_s is None else answer_s
        end = services.loop.time() + timeout_s
        handshake = ClientHandshake(
            self.identity,
            secrets.token_bytes(NONCE_BYTES),
            _offer(self.identity, selection, resumes),
        )
        opening = None
        dialling = Dialling(name, services.backend(where.scheme), self.identity.trust)
        try:
            async with asyncio.timeout(limit_s) as limit:
                where, link = await dialling.link()
                opening = self.open(link, handshake, selection)
                connection = await opening.wait_established()
                limit.reschedule(end)
                limit_s = timeout_s
                left_s = end - services.loop.time()
                await _lanes_up(connection, services.config.lanes, left_s)
        except TimeoutError:
            if not limit.expired():
                raise
            if opening is None:
                raise dialling.late(limit_s) from None
            raise _at(where, opening.timeout(limit_s)) from None
        except (HandshakeError, ProtocolError, ConnectionLost) as exc:
            self.check_open()
            if getattr(exc, "fields", ()) == (OWN_INCARNATION,):
                raise ConnectError(
                    f"cannot connect to {where}: {exc}",
                    address=str(where),
                    errno=errno.ELOOP,
                ) from exc
            raise _at(where, exc) from None
        connection._dialled = Dialled(name, where, transport)
        return connection

    def open(
        self,
        link: Link,
        handshake: Handshake,
        selection: Selection,
        busy: str = "",
    ) -> HandshakeDriver[Connection]:
        """Start a link's handshake, which ends with a connection or an error.

        Args:
            link: A link that has not been started yet.
            handshake: This side of the handshake.
            selection: This side's choice of transports for such links.
            busy: The reason why no more connections are accepted, or "".
        """
        opening = HandshakeDriver(
            link,
            handshake,
            selection,
            self.services.loop,
            agreed=self._agreed,
            busy=busy,
        )
        self._add_driver(opening)
        opening.begin()
        if self.ended:
            link.abort()
        return opening

    def revoked(self, region: RegionRecord) -> None:
        """End the peers' puts and gets in a revoked or closed region."""
        for connection in list(self.connections):
            connection._core.region_revoked(region.id)
            connection._driver.run()

    def _add_driver(self, driver: Driver) -> None:
        """Keep a driver in ``drivers`` until its link has ended."""
        self.drivers[driver] = None  # bounded: CONNECTIONS_MAX, PENDING_HANDSHAKES_MAX
        driver.ended.add_done_callback(
            lambda _: self.drivers.pop(driver, None), context=contextvars.Context()
        )

    def _agreed(
        self, opening: HandshakeDriver[Connection], agreement: Agreement
    ) -> Connection:
        """Make the connection after a successful handshake."""
        services = self.services
        config = self.services.config
        peer = replace(
            agreement.peer,
            address=opening.link.remote_address,
            identity=opening.identity,
        )
        agreement = replace(agreement, peer=peer)
        core = ConnectionCore(
            agreement,
            opening.handshake.framing,
            services.buffers.holds,
            parameters=self.identity.parameters,
            ping_interval_s=config.ping_interval_s,
            ping_misses=config.ping_misses,
            now=services.loop.time(),
        )
        connection = Connection(
            services,
            opening.link,
            core,
            peer=peer,
            lanes=LaneSet(
                opening.selection.scheme, report_of(agreement.choice.verdicts)
            ),
            windows=self.windows,
            ended=self._connection_ended,
        )
        self._add_driver(connection._driver)
        opening.hand_over(connection._driver)
        self.connections[connection] = None
        logger.debug(
            "connection to %s over %s", connection.peer, opening.selection.scheme
        )
        services.counters.connections += 1
        return connection

    def _connection_ended(
        self, connection: Connection, error: ConnectionClosed
    ) -> None:
        """Remove an ended connection; a lost one may be recovered."""
        self.connections.pop(connection, None)
        if isinstance(error, ClosedOK):
            logger.debug("connection to %s closed: %s", connection.peer, error)
            return
        logger.info("connection to %s ended: %s", connection.peer, error)
        self.services.counters.connections_lost += 1
        if not self.ended and self.lost is not None:
            self.lost(connection, error)


def _at(address: Address, error: E) -> E:
    """Prepend the address to a connection error's text; return the error."""
    error.args = (f"{address}: {error}", *error.args[1:])
    return error


async def _lanes_up(connection: Connection, count: int, patience_s: float) -> None:
    """Wait for the data transport; abort the connection if it does not open."""
    try:
        await connection._driver.lane_setup.open_lanes(count, patience_s)
    except BaseException as exc:
        connection.abort(str(exc) or "no transport for the data could be opened")
        raise


def _offer(identity: Identity, selection: Selection, resumes: bytes) -> TransportOffer:
    return TransportOffer(
        name=identity.name,
        backends=tuple([BackendOffer(name, API_VERSION) for name in selection.offered]),
        profile=identity.profile,
        resumes=resumes,
    )
