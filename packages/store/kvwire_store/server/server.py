"""A store that other processes use as a tier: ``kvwire://host:port``.

>>> async with BlockStore.open(["memory:8GiB"]) as store:
...     async with StoreServer(store, "10.0.0.5:7500", psk_file=key) as server:
...         await server.closed()

A client that proves the key may read, and may write unless the server is read-only.
Hashes are not checked: a client that writes wrong bytes under a hash poisons it for all
others of the same tenant. A client is a tenant if it proves the tenant's key, or if its
certificate has the tenant's name. It has its own blocks, so it cannot find, get,
replace or delete another tenant's blocks. A client with the server's own key, or with a
certificate that belongs to no tenant, is the operator: it is no tenant, and may act for
each.

Each client has its own berths, its own task, and its own limits; see
:mod:`kvwire_store.server.session`. A client that breaks a rule is disconnected and
counted. A slow request ends at its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Self, Unpack

import kvwire
from kvwire.aio import AsyncWith, run_to_completion, start_task
from kvwire.config import Config, ConfigOptions
from kvwire.directory.dialable import (
    check_dialable,
    read_advertised,
    warn_of_unknown_name,
)
from kvwire.errors import BackendUnavailable, ClosedOK, UsageError
from kvwire.limits import EAGER_BYTES_MAX, GIB, REQUEST_BYTES_MAX
from kvwire.security.keys import load_keys, read_key_file
from kvwire.security.tls import folded
from kvwire.spi import key_id
from kvwire.types import Address, TrustMode
from kvwire_store.limits import (
    STORE_BERTH_BYTES,
    STORE_BERTHS,
    STORE_BERTHS_MAX,
    STORE_CLIENTS_MAX,
    STORE_REQUEST_BYTES_MAX,
)
from kvwire_store.server.host_windows import WINDOWS
from kvwire_store.server.messages import (
    ClientRow,
)
from kvwire_store.server.served import NOBODY, ServedStore
from kvwire_store.server.session import ClientSession
from kvwire_store.store import BlockStore, access_to
from kvwire_store.tenants import Tenant

logger: logging.Logger = logging.getLogger("kvwire.store")


class StoreServer(AsyncWith):
    """Serves a store on an address, within ``async with``. One event loop.

    Args:
        store: The store to serve. Close it yourself, after the server.
        address: Where to listen; ``"host:0"`` takes any free port.
        config: The configuration, as for :func:`kvwire.open`.
        read_only: Whether clients may get but not put.
        berths: How many transfers of one client may move at once.
        berth_bytes: The most bytes that one transfer moves, and so the largest block. A
            client uses up to ``berths * berth_bytes`` of memory.
        labels: Labels with which the server is announced in the configuration's
            directory, as a member with the role "store"; None to announce nothing.
        advertise: The address that others dial, if the server listens on all
            interfaces: a host, with a port if that differs from the port on which it
            listens.
        **arguments: Keys of :class:`kvwire.Config`, such as ``psk_file``.

    Attributes:
        address: The address on which it listens, with the real port; set by entering
            it.
        communicator: The communicator for its clients, to pass to
            :class:`~kvwire_store.metrics_server.MetricsServer`; set by entering it.

    Raises:
        UsageError: An argument cannot be used.
    """

    address: Address
    communicator: kvwire.Communicator

    def __init__(
        self,
        store: BlockStore,
        address: str | Address,
        config: Config | str | os.PathLike[str] | None = None,
        *,
        read_only: bool = False,
        berths: int = STORE_BERTHS,
        berth_bytes: int = STORE_BERTH_BYTES,
        labels: Mapping[str, str] | None = None,
        advertise: str | Address | None = None,
        **arguments: Unpack[ConfigOptions],
    ) -> None:
        if not 1 <= berths <= STORE_BERTHS_MAX:
            raise UsageError(f"berths={berths}: pass 1 to {STORE_BERTHS_MAX}")
        if not 1 <= berth_bytes <= REQUEST_BYTES_MAX:
            raise UsageError(
                f"berth_bytes={berth_bytes}: pass 1 to {REQUEST_BYTES_MAX}; every "
                "client's block must fit"
            )
        tenants = access_to(store).tiers.tenants.listed
        self._where = Address.parse(address)
        self._labels = labels
        self._advertise = advertise
        if advertise is not None:
            self._advertised(1)
        proofs = _proofs(tenants)
        loaded = _loaded(config, arguments)
        self._config = _config(loaded, tenants, proofs)
        # A name or key in both is the tenant's.
        proofs = _operators(loaded) | proofs
        self._served = ServedStore(store, read_only, berths, berth_bytes, proofs)
        self._entered = False
        self._windows: list[kvwire.Window] = []
        self._accepting: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    def __repr__(self) -> str:
        clients = len(self._served.clients)
        state = "closed" if self._stopped.is_set() else f"{clients} clients"
        return f"<StoreServer {getattr(self, 'address', self._where)}, {state}>"

    @property
    def dropped(self) -> int:
        """Return the number of clients that were disconnected for breaking a rule."""
        return self._served.dropped

    async def __aenter__(self) -> Self:
        """Start to listen; enter it once.

        Raises:
            UsageError: The address cannot be used, or needs a key; or the server was
                entered or closed before.
            ListenError: The address cannot be listened on.

        Cancel safety: nothing stays bound.
        """
        if self._entered or self._stopped.is_set():
            raise UsageError("a StoreServer can be entered only once; make another one")
        store = self._served.access
        if store.is_closed():
            raise UsageError("the store is closed; a StoreServer serves an open one")
        self._entered = True
        self.communicator = await kvwire.open(self._config)
        self._served.name = self.communicator.name
        try:
            self.address = await self.communicator.listen(self._where)
            if self._labels is not None:
                await self._announce(self._labels)
        except BaseException:
            await run_to_completion(self.communicator.close())
            raise
        self._share()
        self._accepting = start_task(self._accept())
        store.servers.add(self.close)
        return self

    def _share(self) -> None:
        """Let this host's clients read memory in place, if all may read all of it.

        Tenants share the slabs, so that no memory stays unused. A process that maps the
        memory can read all blocks in it, so a server with tenants shares nothing.
        """
        tiers = self._served.access.tiers
        if self._config.one_sided_windows == "off":
            return
        try:
            shared = tiers.memory.share()
            if shared is None:
                return
            for name, memory in zip(WINDOWS, shared.regions, strict=True):
                # These windows offer nothing themselves: their blocks have their own
                # generations.
                block_bytes = math.gcd(memory.nbytes, GIB)
                window = self.communicator.expose(name, memory, block_bytes=block_bytes)
                self._windows.append(window)
        except (BackendUnavailable, UsageError, OSError) as exc:
            logger.info("store server: memory is not read in place: %s", exc)
            return
        self._served.slab_bytes = tiers.memory.index.slabs.slab_bytes

    async def _announce(self, labels: Mapping[str, str]) -> None:
        where = None
        if self._advertise is not None:
            where = self._advertised(self.address.port)
            await warn_of_unknown_name(where)
        self.communicator.announce(role="store", labels=labels, address=where)

    def _advertised(self, port: int) -> Address:
        """Return the address that clients dial for a server on this port."""
        where = self._advertise
        if not isinstance(where, Address):
            where = read_advertised(str(where))
        where = replace(where, port=where.port or port)
        try:
            check_dialable(where)
        except UsageError as exc:
            raise UsageError(f"advertise: {exc}") from None
        return where

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        """Close it completely, even if the caller is cancelled repeatedly."""
        await self._served.access.thread.leave(self.close)

    async def close(self) -> None:
        """End every connection, and wait until the server no longer touches the store.

        Running requests have ``close_timeout_s``. May be called repeatedly, and before
        the server listens.

        Cancel safety: safe, it may be called again.
        """
        if self._accepting is not None:
            await self.communicator.close()
            await asyncio.wait((self._accepting,))
        while self._windows:
            # Its memory may be freed once nothing here refers to it.
            await self._windows.pop().close()
        while serving := tuple(self._served.clients.values()):
            await asyncio.wait(serving)
        self._served.access.servers.discard(self.close)
        self._stopped.set()

    async def closed(self) -> None:
        """Wait until it is closed.

        Cancel safety: safe, it only watches.
        """
        self._served.access.thread.check("StoreServer.closed")
        await self._stopped.wait()

    def clients(self) -> tuple[ClientRow, ...]:
        """Return the connected clients."""
        return tuple(client.row() for client in self._served.clients)

    # --- inside -----------------------------------------------------------------------

    async def _accept(self) -> None:
        try:
            while True:
                connection = await self.communicator.accept()
                peer = connection.peer
                tenant = self._served.proved(peer.identity or peer.key_id)
                if tenant is None:
                    logger.warning("store server: %s: %s", peer, NOBODY)
                    connection.abort(NOBODY)
                    continue
                # bounded: connections_max of the communicator
                session = ClientSession(self._served, connection, tenant)
                task = start_task(session.run())
                self._served.clients[session] = task
                of = f" of tenant {tenant}" if tenant else ""
                logger.info("store server: client %s%s has connected", peer, of)
                task.add_done_callback(partial(self._gone, session))
        except ClosedOK:
            return

    def _gone(self, client: ClientSession, _: asyncio.Task[None]) -> None:
        del self._served.clients[client]
        row = client.row()
        logger.info(
            "store server: client %r at %s has left: %d requests, %d bytes read, "
            "%d written",
            row.name,
            row.address,
            row.asked,
            row.read_bytes,
            row.written_bytes,
        )


def _proofs(tenants: Sequence[Tenant]) -> dict[bytes | str, str]:
    """Return the tenants by their proof: the id of a key, or an identity."""
    proofs: dict[bytes | str, str] = {}
    for tenant in tenants:
        keys = [key_id(read_key_file(tenant.key_file))] if tenant.key_file else []
        names = [folded(tenant.identity)] if tenant.identity else []
        given: list[bytes | str] = [*keys, *names]
        for proof in given:
            if proof in proofs:
                raise UsageError(
                    f"tenants {proofs[proof]} and {tenant.name} have the same key or "
                    "identity; give each its own"
                )
            proofs[proof] = tenant.name
    return proofs


def _operators(config: Config) -> dict[bytes | str, str]:
    """Return the operator's proofs: the keys and names in the caller's config."""
    trust, _, keys = load_keys(config)
    if trust is TrustMode.LOOPBACK:
        return {b"": ""}  # no client has a proof
    return dict.fromkeys((*keys, *map(folded, config.tls_peers)), "")


def _loaded(
    config: Config | str | os.PathLike[str] | None, arguments: ConfigOptions
) -> Config:
    if arguments.get("psk_file"):
        arguments.setdefault("trust", "psk")
    if isinstance(config, Config):
        return config.replace(**arguments)
    return Config.load(config, **arguments)


def _config(
    loaded: Config, tenants: Sequence[Tenant], proofs: Mapping[bytes | str, str]
) -> Config:
    """Return the caller's config, with the settings that a server adds."""
    keys = tuple(tenant.key_file for tenant in tenants if tenant.key_file)
    if keys and loaded.trust != "psk":
        raise UsageError(
            "tenants have keys, so the server needs a key too: set psk_file"
        )
    if keys and key_id(read_key_file(loaded.psk_file)) in proofs:
        raise UsageError("psk_file is also a tenant's key; give the server its own key")
    identities = tuple(tenant.identity for tenant in tenants if tenant.identity)
    if identities and loaded.trust != "mtls":
        raise UsageError('tenants have identities, so the server needs trust="mtls"')
    return loaded.replace(
        psk_accept_files=(*loaded.psk_accept_files, *keys),
        tls_peers=tuple(dict.fromkeys((*loaded.tls_peers, *identities))),
        # A receive allocates what a client announces, up to this.
        message_bytes=STORE_REQUEST_BYTES_MAX,
        # A thousand keys, or a small block, are sent at once.
        eager_bytes=EAGER_BYTES_MAX,
        # If a connection is lost, the request's answer is lost, and so is its transfer.
        resume=False,
        # Tenants share the memory, and a process that maps it can read all of it. The
        # first tenant is the operator.
        one_sided_windows="off" if len(tenants) > 1 else loaded.one_sided_windows,
        connections_max=min(loaded.connections_max, STORE_CLIENTS_MAX),
    )
