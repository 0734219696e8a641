"""A store that other processes use: ``kvwire://host:port`` is a tier of theirs.

>>> async with kvwire.BlockStore.open(["memory:8GiB"]) as store:
...     async with kvwire.StoreServer(store, "10.0.0.5:7500", psk_file=key) as server:
...         await server.closed()

Whoever proves the key may read, and write unless the server is read-only. A hash is
taken at its word: who writes wrong bytes under a hash poisons it for all others of the
same tenant. A tenant of the store is who proves its key, or has its name in a
certificate; its keys are its own, so it cannot look for, get, replace or delete what is
another's. Who has the server's own key, or a certificate that is no tenant's, is the
operator: none of them, and may act for each.

Each client has its own berths, its own task, and its own limits; see
:mod:`kvwire.store.server.session`. What breaks a rule ends that client's connection and
is counted. What is slow ends with its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Self, Unpack

import kvwire
from kvwire.aio import run_to_completion, start_task
from kvwire.config import Config, ConfigOptions
from kvwire.directory.dialable import (
    check_dialable,
    read_advertised,
    warn_of_unknown_name,
)
from kvwire.errors import ClosedOK, UsageError
from kvwire.limits import EAGER_BYTES_MAX, REQUEST_BYTES_MAX
from kvwire.security.keys import read_key_file
from kvwire.store.limits import (
    STORE_BERTH_BYTES,
    STORE_BERTHS,
    STORE_BERTHS_MAX,
    STORE_CLIENTS_MAX,
    STORE_REQUEST_BYTES_MAX,
)
from kvwire.store.server.messages import (
    ClientRow,
)
from kvwire.store.server.served import ServedStore
from kvwire.store.server.session import ClientSession
from kvwire.store.store import BlockStore, access_to
from kvwire.store.tenants import Tenant
from kvwire.types import Address
from kvwire.wire.handshake_messages import key_id

logger: logging.Logger = logging.getLogger("kvwire.store")


class StoreServer:
    """Serves a store on an address, within ``async with``. One event loop.

    Args:
        store: What is served; whoever opened it closes it, after the server.
        address: Where to listen; ``"host:0"`` takes any free port.
        config: As for :func:`kvwire.open`.
        read_only: Clients may get and not put.
        berths: How many transfers of one client may move at once.
        berth_bytes: The most that one transfer moves, so the largest block. The memory
            of a client is ``berths * berth_bytes``, as far as it is used.
        labels: Announces it in the directory of the configuration as a member of the
            role "store", with these labels; None for not at all.
        advertise: The address under which others reach it, if it listens on all
            interfaces: a host, and a port if that differs from the one it listens on.
        **arguments: Keys of :class:`kvwire.Config`, such as ``psk_file``.

    Attributes:
        address: Where it listens, with the real port; once it is entered.
        communicator: The communicator of its clients, for
            :class:`~kvwire.observe.http.MetricsServer`; once it is entered.

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
            raise UsageError(f"berths={berths}: 1 to {STORE_BERTHS_MAX}")
        if not 1 <= berth_bytes <= REQUEST_BYTES_MAX:
            raise UsageError(
                f"berth_bytes={berth_bytes}: 1 to {REQUEST_BYTES_MAX}; a block of "
                f"every client has to fit"
            )
        tiers = access_to(store).tiers
        if lossy := tiers.lossy:
            raise UsageError(
                f"{store.name}: codec={lossy} loses bits, and clients have not agreed "
                f"to that; serve it with another codec or none"
            )
        tenants = tiers.tenants.listed
        self._where = Address.parse(address)
        self._labels = labels
        self._advertise = advertise
        if advertise is not None:
            self._advertised(1)
        proofs = _proofs(tenants)
        self._config = _config(config, arguments, tenants, proofs)
        self._served = ServedStore(store, read_only, berths, berth_bytes, proofs)
        self._entered = False
        self._accepting: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    def __repr__(self) -> str:
        clients = len(self._served.clients)
        state = "closed" if self._stopped.is_set() else f"{clients} clients"
        return f"<StoreServer {getattr(self, 'address', self._where)}, {state}>"

    @property
    def dropped(self) -> int:
        """Return how many clients broke a rule and were let go of."""
        return self._served.dropped

    async def __aenter__(self) -> Self:
        """Start to listen; enter it once.

        Raises:
            UsageError: The address cannot be used, or needs a key; or it was entered
                or closed before.
            ListenError: The address cannot be listened on.

        Cancel safety: nothing stays bound.
        """
        if self._entered or self._stopped.is_set():
            raise UsageError("a StoreServer is entered once; make another one")
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
        self._accepting = start_task(self._accept())
        store.servers.add(self.close)
        return self

    async def _announce(self, labels: Mapping[str, str]) -> None:
        where = None
        if self._advertise is not None:
            where = self._advertised(self.address.port)
            await warn_of_unknown_name(where)
        self.communicator.announce(role="store", labels=labels, address=where)

    def _advertised(self, port: int) -> Address:
        """Return by which address others reach a server that listens on a port."""
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
        """Close it, to the end also if the caller is cancelled again and again."""
        await self._served.access.thread.leave(self.close)

    async def close(self) -> None:
        """End every connection, and return when nothing of it touches the store.

        What was begun has ``close_timeout_s``. Any number of times, and also of one
        that does not listen yet.

        Cancel safety: safe, it may be called again.
        """
        if self._accepting is not None:
            await self.communicator.close()
            await asyncio.wait((self._accepting,))
        if self._served.clients:
            await asyncio.wait(tuple(self._served.clients.values()))
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
                # bounded: connections_max of the communicator
                session = ClientSession(self._served, connection)
                task = start_task(session.run())
                self._served.clients[session] = task
                task.add_done_callback(partial(self._gone, session))
        except ClosedOK:
            return

    def _gone(self, client: ClientSession, _: asyncio.Task[None]) -> None:
        del self._served.clients[client]


def _proofs(tenants: Sequence[Tenant]) -> dict[bytes | str, str]:
    """Return which tenant a key or an identity proves."""
    proofs: dict[bytes | str, str] = {}
    for tenant in tenants:
        keys = [key_id(read_key_file(tenant.key_file))] if tenant.key_file else []
        names = [tenant.identity] if tenant.identity else []
        given: list[bytes | str] = [*keys, *names]
        for proof in given:
            if proof in proofs:
                raise UsageError(
                    f"tenants {proofs[proof]} and {tenant.name} have one key or "
                    f"identity; give each its own"
                )
            proofs[proof] = tenant.name
    return proofs


def _config(
    config: Config | str | os.PathLike[str] | None,
    arguments: ConfigOptions,
    tenants: Sequence[Tenant],
    proofs: Mapping[bytes | str, str],
) -> Config:
    """Return the caller's config, with what a server needs beside it."""
    if arguments.get("psk_file"):
        arguments.setdefault("trust", "psk")
    loaded = (
        config.replace(**arguments)
        if isinstance(config, Config)
        else Config.load(config, **arguments)
    )
    keys = tuple(tenant.key_file for tenant in tenants if tenant.key_file)
    if keys and loaded.trust != "psk":
        raise UsageError("tenants have keys, so the server needs one: psk_file")
    if keys and key_id(read_key_file(loaded.psk_file)) in proofs:
        raise UsageError("psk_file is a tenant's key; give the server one of its own")
    identities = tuple(tenant.identity for tenant in tenants if tenant.identity)
    if identities and loaded.trust != "mtls":
        raise UsageError('tenants have identities, so the server needs trust="mtls"')
    return loaded.replace(
        psk_accept_files=(*loaded.psk_accept_files, *keys),
        tls_peers=tuple(dict.fromkeys((*loaded.tls_peers, *identities))),
        # A receive allocates what a client announces, up to this.
        message_bytes=STORE_REQUEST_BYTES_MAX,
        # A thousand keys, or a small block, go at once.
        eager_bytes=EAGER_BYTES_MAX,
        # The answer to a request is lost with its connection, so its transfer is.
        resume=False,
        connections_max=min(loaded.connections_max, STORE_CLIENTS_MAX),
    )
