"""A communicator: one identity, its listeners and connections, all on one loop.

The parts of a communicator never refer to the communicator itself: they share
:class:`kvwire.driver.services.Services`, and :class:`kvwire.endpoint.links.Links`
holds the dialled and accepted links. This module assembles the parts, checks the
calling thread, and closes everything in the right order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator, Generator, Iterable, Mapping
from typing import Any, Final, Self, Unpack

from kvwire.aio import (
    FORKED,
    AsyncWith,
    Opening,
    at_most,
    run_to_completion,
    unusable,
    yields_before_raising,
)
from kvwire.backend.selection import check_transports, offered
from kvwire.config import Config, ConfigOptions
from kvwire.directory import Record, Selector
from kvwire.directory.dialable import check_dialable
from kvwire.directory.limits import MEMBER_LEASE_S
from kvwire.directory.selector import FIELDS
from kvwire.driver.counters import Counters
from kvwire.endpoint.acceptor import Acceptor
from kvwire.endpoint.connection import Connection
from kvwire.endpoint.inspector import Inspector
from kvwire.endpoint.links import Links
from kvwire.endpoint.membership import Membership, spec_digests
from kvwire.endpoint.observers import Observers, TransferLog, transfers_logger
from kvwire.endpoint.peer import Peer
from kvwire.endpoint.reconnect import Reconnector
from kvwire.endpoint.region import Region, register
from kvwire.endpoint.snapshot import (
    Snapshot,
    TransferSnapshot,
    snapshot_of,
    transfer_snapshots,
)
from kvwire.endpoint.windows.window import Window
from kvwire.errors import ClosedOK, UsageError, wrong_type
from kvwire.kv.blocks import Blocks
from kvwire.kv.paged import PagedCache
from kvwire.limits import CLOSE_SLACK_S
from kvwire.memory.buffers import Memory
from kvwire.memory.device.copy_engine import CopyEngine
from kvwire.proto.handshake import Identity
from kvwire.security.keys import load_keys
from kvwire.security.tls import CredentialFiles
from kvwire.security.validity import Validity
from kvwire.transfers.event_wait import wait_event
from kvwire.transfers.incoming import Incoming
from kvwire.transfers.options import PublishOptions, ReceiveOptions, check_options
from kvwire.transfers.outgoing import Outgoing
from kvwire.transfers.registry import TransferRegistry, TransferServices
from kvwire.types import Access, AccessName, Address, Device
from kvwire.wire.handshake_messages import ConnectionParameters

# The most peers that one communicator knows by name; each may have a connection.
PEERS_MAX: Final = 4096

logger: logging.Logger = logging.getLogger("kvwire.connections")


class Communicator(AsyncWith):
    """Connects to peers and accepts connections. Created by :func:`kvwire.open`."""

    def __init__(self, config: Config) -> None:
        check_transports(config)
        trust, psk, keys = load_keys(config)
        tls = CredentialFiles(config) if config.trust == "mtls" else None
        if not config.name:
            config = config.replace(name=f"{socket.gethostname()}:{os.getpid()}")
        self._watchers: Observers = Observers()
        if transfers_logger.isEnabledFor(logging.DEBUG):
            self._watchers.add(TransferLog())
        self._registry = TransferRegistry()
        self._services = TransferServices(config, tls)
        self._services.registry = self._registry
        self._services.watchers = self._watchers
        self._thread = self._services.thread
        identity = Identity(
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
        self._links = Links(self._services, identity)
        self._recovery = Reconnector(self._links)
        self._acceptor = Acceptor(self._links, self._recovery)
        self._membership = Membership(config.directory)
        self._inspector = Inspector(self._links)
        self._peers: dict[str, Peer] = {}

    def __repr__(self) -> str:
        links = self._links
        config = self.config
        state = "closed" if links.closed else f"{len(links.connections)} connections"
        return f"<Communicator {config.name!r}, trust {config.trust}, {state}>"

    @property
    def config(self) -> Config:
        """Return its configuration."""
        return self._services.config

    @property
    def counters(self) -> Counters:
        """The communicator's counts since it was opened."""
        return self._services.counters

    @property
    def watchers(self) -> Observers:
        """Return the observers that are called when KV transfers begin and end."""
        return self._watchers

    @property
    def incarnation(self) -> bytes:
        """Return 16 random bytes that identify this start of the communicator."""
        return self._links.identity.incarnation

    @property
    def name(self) -> str:
        """Return the name that peers see."""
        return self.config.name

    @property
    def closed(self) -> bool:
        """Whether it is closing, or closed."""
        return self._links.closed

    @property
    def open_transfers(self) -> int:
        """Return the number of transfers without an outcome."""
        return len(self._registry.live)

    @property
    def quarantined_bytes(self) -> int:
        """Return the bytes of ended requests that transports may still touch."""
        return self._services.buffers.quarantined_bytes

    @property
    def live_connections(self) -> tuple[Connection, ...]:
        """Return the connections that have not ended; a snapshot."""
        return tuple(self._links.connections)

    # --- connections ------------------------------------------------------------------

    async def listen(self, address: str | Address) -> Address:
        """Accept connections on an address; :meth:`connections` returns them.

        Args:
            address: ``"host:port"`` or ``"scheme://..."``; port 0 takes any free port.
                If a host name has several addresses, all are bound, with the same port.

        Returns:
            The bound address, with the real port; for a host name, its first address.

        Raises:
            UsageError: The address cannot be used, or needs a trust mode.
            BackendUnavailable: Its transport is not installed, or ruled out by config.
            ListenError: The address is taken, or does not belong to this host. Also an
                OSError.

        Cancel safety: safe, nothing stays bound.
        """
        self._thread.check("Communicator.listen")
        return await self._acceptor.listen(address)

    async def connect(
        self,
        address: str | Address,
        *,
        transport: str | Iterable[str] | None = None,
        timeout_s: float | None = None,
    ) -> Connection:
        """Connect to a communicator that listens.

        Args:
            address: Where it listens. If a host name has several addresses, they are
                dialled a quarter of a second apart, and the first to answer is used.
            transport: A required transport, or several in order of preference.
            timeout_s: Seconds until the connection must be usable; None for the
                configured ``handshake_timeout_s``.

        Raises:
            UsageError: The address cannot be used, or needs a trust mode.
            BackendUnavailable: No required transport can run here.
            HandshakeError: The sides do not agree; the error names the fields.
            ConnectionClosed: The peer ended the connection during the handshake.
            ConnectError: Nothing listens there, it cannot be reached, or this
                communicator itself listens there. Also an OSError.

        Cancel safety: safe, a half-made connection is aborted.
        """
        self._thread.check("Communicator.connect")
        return await self._links.connect(address, transport, timeout_s)

    def connections(self) -> AsyncIterator[Connection]:
        """Iterate inbound connections, in the order their handshakes ended.

        Ends when the communicator is closed. Several tasks may iterate; each
        connection goes to one of them.

        Cancel safety: safe, no connection is lost, and the iterator can be used again.
        """
        self._thread.check("Communicator.connections")
        return self._acceptor.inbound

    @yields_before_raising
    async def accept(self) -> Connection:
        """Wait for the next inbound connection.

        Raises:
            ClosedOK: The communicator was closed.

        Cancel safety: safe, no connection is lost.
        """
        self._thread.check("Communicator.accept")
        return await self._acceptor.inbound.take()

    # --- windows ----------------------------------------------------------------------

    def expose(
        self,
        name: str,
        memory: PagedCache | Memory,
        *,
        block_bytes: int | None = None,
    ) -> Window:
        """Let peers read blocks of a cache, or of plain bytes, without asking.

        No block is offered yet: see :meth:`Window.offer <kvwire.Window.offer>`. Every
        peer of this communicator may open the window, and may read the blocks for which
        it has a ticket. The setting ``one_sided_windows`` decides which peers on this
        host or behind RDMA may read the memory in place; such a peer could also read
        blocks that were not offered.

        Args:
            name: The name by which peers open it.
            memory: A cache, or contiguous memory, which is divided into blocks.
            block_bytes: The size of each block of plain memory.

        Raises:
            UsageError: The memory cannot be used, or the name is taken.
            ClosedOK: The communicator is closed.
        """
        self._thread.check("Communicator.expose")
        self._links.check_open()
        return self._links.windows.expose(name, memory, block_bytes)

    # --- fleets -----------------------------------------------------------------------

    def peer(self, where: str | Record) -> Peer:
        """Return the peer at an address, or one that a directory selector matches.

        The peer is not dialled before its first use. Equal texts return the same peer,
        and a peer has one connection: to spread load, use one peer for each of
        :meth:`members`.

        Args:
            where: ``"host:port"``, a selector such as ``"role=decode,model=demo"``, or
                one of :meth:`members`.

        Raises:
            UsageError: The text is neither an address nor a selector, the configured
                directory cannot be used, or there are too many peers.
            BackendUnavailable: The directory's library is missing.
            ClosedOK: The communicator is closed.
        """
        self._thread.check("Communicator.peer")
        self._links.check_open()
        if isinstance(where, Record):
            named = f"incarnation={where.incarnation}"
            where = named if where.incarnation else where.address
        if not isinstance(where, str):
            raise wrong_type(
                "peer", where, 'a text, "host:port" or "role=prefill", or a member'
            )
        peers = self._peers
        if where not in peers:
            if len(peers) >= PEERS_MAX:
                raise UsageError(
                    f"{len(peers)} peers are open, which is the limit; close() some"
                )
            peer = Peer(self._links, self._membership, self._recovery, peers, where)
            peers[where] = peer  # bounded: PEERS_MAX
        return peers[where]

    @yields_before_raising
    async def members(self, selector: str = "") -> tuple[Record, ...]:
        """Return the other members of the directory that match a selector.

        The first call begins to watch the directory; later calls return the known
        members at once. Members with the least ``load`` come first, in random order if
        equal.

        Args:
            selector: As for :meth:`peer`; by default every member.

        Raises:
            ConnectError: No member is known yet, and the directory cannot be reached.
            UsageError: The text is no selector, or the directory cannot be used.
            BackendUnavailable: The directory's library is missing.
            ClosedOK: The communicator is closed.

        Cancel safety: safe, it only reads.
        """
        self._thread.check("Communicator.members")
        self._links.check_open()
        found = await self._membership.meant_by(Selector.parse(selector))
        mine = self.incarnation.hex()
        others = [one for one in found if one.key != mine]
        # Members with equal loads are shuffled, so that clients spread over them.
        random.shuffle(others)
        return tuple(sorted(others, key=lambda one: one.load))

    def announce(
        self,
        *,
        role: str = "",
        model: str = "",
        cache: PagedCache | None = None,
        labels: Mapping[str, str] | None = None,
        load: float = 0.0,
        address: str | Address | None = None,
        lease_s: float = MEMBER_LEASE_S,
    ) -> None:
        """Announce this communicator in its configured directory.

        Returns at once. The record is written as soon as the directory can be reached,
        then renewed until :meth:`close` withdraws it. Another call replaces the record,
        for instance to change the load. Records prove nothing and peers do not trust
        them: see docs/howto/directory.md.

        Args:
            role: Its role, such as ``"decode"``.
            model: A fingerprint of its model; by default the cache's.
            cache: Its cache; the record contains a digest of each group's spec.
            labels: Further terms for selectors.
            load: How busy it is, from 0 to 1; the least busy is dialled first.
            address: The address that peers dial; by default the first listening one.
            lease_s: Seconds after its last renewal until peers consider it gone.

        Raises:
            UsageError: ``address`` is not given and it does not listen, or listens on
                all addresses; or a value is not allowed.
            BackendUnavailable: The directory's library is missing.
            ClosedOK: The communicator is closed.
        """
        self._thread.check("Communicator.announce")
        if cache is not None and not isinstance(cache, PagedCache):
            raise wrong_type("cache", cache, "a kvwire.PagedCache")
        if labels is not None and not isinstance(labels, Mapping):
            raise wrong_type("labels", labels, "a mapping of names to texts")
        for name in FIELDS & (labels or {}).keys():
            raise UsageError(
                f"labels: {name!r} is a field that every record has; give the label "
                "another name"
            )
        specs = {} if cache is None else spec_digests(cache)
        if cache is not None and not model:
            model = next(iter(cache.groups.values())).spec.fingerprint
        self._links.check_open()
        if address is None:
            if not self._acceptor.listeners:
                raise UsageError("announce: listen first, or pass address=")
            address = self._acceptor.listeners[0].address
        where = _dialable(address)
        record = Record(
            name=self.name,
            address=str(address),
            incarnation=self.incarnation.hex(),
            transports=offered(self.config, where.scheme),
            role=role,
            model=model,
            specs=specs,
            labels=dict(labels or {}),
            load=load,
            lease_s=lease_s,
        )
        self._membership.announce(record)

    async def withdraw(self) -> None:
        """Withdraw the announcement, so that no new peer finds this communicator.

        Existing connections stay open. Never raises: if the directory cannot be
        reached, the record expires with its lease.

        Cancel safety: safe, the record is no longer renewed.
        """
        self._thread.check("Communicator.withdraw")
        await self._membership.withdraw()

    # --- memory -----------------------------------------------------------------------

    def register(self, buffer: Memory, access: AccessName | Access = "read") -> Region:
        """Lend memory to peers; each peer needs a grant to reach it.

        Args:
            buffer: Contiguous memory, also on a GPU, or fragments. It must be writable
                if peers may put into it.
            access: ``"read"`` lets peers get, ``"write"`` lets them put,
                ``"readwrite"`` both.

        Raises:
            UsageError: The memory cannot be used.
        """
        self._thread.check("Communicator.register")
        return register(self._links, buffer, access)

    # --- KV transfers -----------------------------------------------------------------

    def publish(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[PublishOptions],
    ) -> Outgoing:
        """Offer a transfer to the peers that pull it by its id.

        Args:
            id: The name that both applications use; free again once the transfer has
                ended.
            cache: The cache that holds the blocks.
            blocks: Block ids in token order, or ``{group: ids}``.
            consumers: How many peers pull it, for example the number of ranks in a
                tensor-parallel group.
            lease_s: How many seconds the blocks are held while a consumer is missing.
            deadline, priority, tokens, hashes, content, codec, free: As for
                :meth:`Connection.pull <kvwire.Connection.pull>`.
            group_bytes, growing: As for
                :meth:`Connection.push <kvwire.Connection.push>`.

        Raises:
            UsageError: The id is in use, or the cache or blocks cannot be used.
        """
        self._thread.check("Communicator.publish")
        check_options("publish", options)
        consumers = options.get("consumers", 1)
        outgoing = Outgoing(self._services, id, cache, blocks, options, consumers)
        self._links.check_open()
        self._registry.offer(outgoing)
        return outgoing

    def expect(
        self,
        id: str | bytes | int,
        cache: PagedCache,
        blocks: Blocks,
        **options: Unpack[ReceiveOptions],
    ) -> Incoming:
        """Receive a transfer that a peer pushes by its id.

        The arguments are those of :meth:`Connection.pull <kvwire.Connection.pull>`.

        Raises:
            UsageError: The id is in use, or the cache or blocks cannot be used.
        """
        self._thread.check("Communicator.expect")
        check_options("expect", options)
        incoming = Incoming(self._services, id, cache, blocks, options)
        self._links.check_open()
        self._registry.offer(incoming)
        return incoming

    def transfers(self) -> tuple[TransferSnapshot, ...]:
        """Return the open transfers, oldest first, with their reasons for waiting.

        Meant for operators and logs: its cost grows with the number of open transfers.
        """
        self._thread.check("Communicator.transfers")
        return transfer_snapshots(self._registry.views())

    def snapshot(self) -> Snapshot:
        """Return the open connections, transfers and stores, and the counters.

        The values are plain, so ``msgspec.json.encode`` accepts them; ``kvwire top``
        shows the same data for a live process. See docs/howto/observe.md.
        """
        self._thread.check("Communicator.snapshot")
        return snapshot_of(self._links)

    @yields_before_raising
    async def fired(self, event: Any) -> None:
        """Wait until an event on a GPU stream has fired; the stream does not wait.

        Use it before ``pull`` or ``expect`` if kernels still read the blocks: both
        calls write to the blocks from other streams.

        Args:
            event: A torch or CuPy event, recorded after the kernels.

        Raises:
            UsageError: It is not an event of torch or CuPy.
            BackendUnavailable: The event's GPU has failed, or does not work.
            ClosedOK: The communicator is closed.

        Cancel safety: safe, it only watches.
        """
        self._thread.check("Communicator.fired")
        self._links.check_open()
        await wait_event(event, self._services.devices)

    # --- the end ----------------------------------------------------------------------

    async def drain(self) -> None:
        """Withdraw, and wait until no transfer is open and their memory is free.

        Call it before ``close``, which ends the transfers that are still open. Peers
        that are connected can begin transfers meanwhile, and it waits for those too, so
        first stop taking requests.

        Cancel safety: safe, the announcement stays withdrawn.
        """
        self._thread.check("Communicator.drain")
        await self._membership.withdraw()
        while live := list(self._registry.live):
            for end in live:
                await end.drained()

    async def close(self) -> None:
        """Close every listener and connection gracefully, within ``close_timeout_s``.

        If a transfer has its outcome here, but the link was lost before the producer
        got the report, the report is sent over another link within that time.

        If a transport may still touch memory after that time, an error is logged and
        that memory stays in quarantine.

        Cancel safety: safe. Connections that are closing continue; call it again to
        close the rest.
        """
        self._thread.check("Communicator.close")
        self._stop()
        services = self._services
        links = self._links
        registry = self._registry
        await self._inspector.close()
        await self._membership.close()
        if links.ended:  # it was aborted, so nothing may be redialled
            await self._end_links()
        # 1. Open requests and reports of transfers may finish, within the time limit.
        # Lost links are still redialled for these reports.
        registry.closing()
        patience_s = self.config.close_timeout_s + CLOSE_SLACK_S
        closing = [connection.close() for connection in links.connections]
        await at_most(patience_s, [registry.all_settled.wait(), *closing])
        # 2. From here on no link is made. The connections that are left include links
        # that were made only to report landed parts to a producer.
        await self._end_links()
        await at_most(CLOSE_SLACK_S, [c.close() for c in links.connections])
        # 3. Transfers that are still open end, and links are cut. Memory is free where
        # the transport lets it go in time.
        registry.stop(ClosedOK("the communicator was closed"))
        for driver in links.drivers:
            driver.link.abort()
        if links.drivers:
            await asyncio.wait([d.ended for d in links.drivers], timeout=patience_s)
        if links.drivers:
            logger.error(
                "the transports of %d connections may still touch memory; %d bytes "
                "stay in quarantine",
                len(links.drivers),
                self.quarantined_bytes,
            )
        windows = [window.close() for window in list(links.windows.open.values())]
        await at_most(CLOSE_SLACK_S, windows)
        await self._acceptor.close()
        await services.close()

    def abort(self) -> None:
        """End every connection and leave the directory now. Never raises.

        ``close`` waits for the remains.
        """
        self._thread.check("Communicator.abort")
        self._stop()
        self._membership.leave()
        self._links.end()
        for connection in list(self._links.connections):
            connection.abort("the communicator was aborted")

    async def __aenter__(self) -> Self:
        """Return the communicator; it is closed at the end of the block."""
        self._thread.check("async with Communicator")
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Close it, or abort if an exception left the block."""
        if error is not None and self._thread.ident != FORKED:
            self.abort()
        await self._thread.leave(self.close)

    def _stop(self) -> None:
        """Refuse new transfers, connections and peers from now on."""
        if not self._links.closed:
            self._links.closed = True
            self._acceptor.inbound.close()
            for peer in list(self._peers.values()):
                peer._stop()

    async def _end_links(self) -> None:
        """Refuse new links, stop redialling, and close the listeners."""
        self._links.end()
        await self._recovery.close()
        for listener in self._acceptor.listeners:
            await listener.close()


@unusable(
    "it is not open yet: `it = await kvwire.open(...)`, or "
    "`async with kvwire.open(...) as it`",
    result=Communicator,
)
class open(Opening):  # noqa: A001, N801 - `kvwire.open` is the public name, and reads as a call
    """Open a communicator: ``await kvwire.open(...)``, or ``async with``.

    Args:
        config: A Config, the path of a TOML file, or None for the environment alone.
        **arguments: Keys of Config that override ``config``, such as
            ``name="decode-0"``.

    Attributes:
        config: The resulting configuration.

    Raises:
        UsageError: The configuration cannot be used.

    Cancel safety: safe, opening does not wait for anything.
    """

    _made_by = "kvwire.open"

    def __init__(
        self,
        config: Config | str | os.PathLike[str] | None = None,
        **arguments: Unpack[ConfigOptions],
    ) -> None:
        self.config: Config
        if isinstance(config, Config):
            # Checked here, since a Config that was constructed directly is unchecked.
            self.config = config.replace(**arguments)
        else:
            self.config = Config.load(config, **arguments)
        self._communicator: Communicator | None = None

    def __await__(self) -> Generator[Any, Any, Communicator]:
        return self._open().__await__()

    async def __aenter__(self) -> Communicator:
        """Open the communicator; it is closed at the end of the block."""
        self._communicator = await self._open()
        return self._communicator

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Close it, or abort if an exception left the block."""
        assert self._communicator is not None
        await self._communicator.__aexit__(kind, error, trace)

    @yields_before_raising
    async def _open(self) -> Communicator:
        self._begin()
        communicator = Communicator(self.config)
        if self.config.inspect:
            try:
                await communicator._inspector.start()
            except BaseException:
                await run_to_completion(communicator.close())
                raise
        return communicator


def services_of(communicator: Communicator) -> TransferServices:
    """Return the communicator's shared services; for rooms above, and tests."""
    return communicator._services


def _dialable(address: str | Address) -> Address:
    """Return an address that other hosts can dial, to be announced."""
    try:
        where = Address.parse(address)
        check_dialable(where)
    except UsageError as exc:
        raise UsageError(
            f"announce: {exc}; pass address=, the address that other hosts can reach"
        ) from None
    return where


def copy_engine(communicator: Communicator, device: Device) -> CopyEngine:
    """Return the queue on which a communicator copies; the first caller makes it."""
    return services_of(communicator).devices.copy_engine(device)


def certificate_of(communicator: Communicator) -> Validity | None:
    """Return the certificate's validity; None unless trust is ``mtls``. Thread-safe."""
    return services_of(communicator).certificate
