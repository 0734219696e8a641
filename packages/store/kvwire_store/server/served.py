"""The state that all sessions of a store server share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvwire.config import ANYBODY
from kvwire.errors import sayable
from kvwire.limits import NAME_CHARS_MAX
from kvwire_store.limits import (
    STORE_CLIENTS_MAX,
    STORE_LENT_SHARE,
    STORE_NAMESPACES_TOLD,
    STORE_REQUESTS_MAX,
)
from kvwire_store.server.client_memory import ClientMemory
from kvwire_store.server.messages import (
    VERSIONS,
    ClientRow,
    NamespaceText,
    StatsReport,
    TenantRow,
    TierRow,
    Welcome,
)
from kvwire_store.store import BlockStore, StoreAccess, access_to

NOBODY: Final = "it has proved to be neither a tenant nor the operator"
"""Why a client is refused that this side accepts, but does not know."""


class _Client(Protocol):
    """The part of a session that the other sessions use."""

    def row(self) -> ClientRow:
        """Return the client's name and counts, for reports."""


@dataclass(slots=True)
class ServedStore:
    """A served store, and its server's settings. One event loop.

    Attributes:
        store: The store.
        read_only: Whether clients may get but not put.
        berths: How many requests of one client may move blocks at once.
        berth_bytes: The most bytes of blocks that one of these requests moves.
        proofs: Tenants by their proof, and "" for the operator's: the id of a key, or
            an identity; ``ANYBODY`` for every other identity.
        name: The server's name, once it listens.
        clients: The connected clients, each with the task that serves it.
        dropped: The number of clients that were disconnected for breaking a rule.
        lent_bytes: Bytes of the slots that are pinned while clients move them.
        memory: The other memory that all clients hold.
        access: The store's internal parts.
        slab_bytes: Bytes of a slab, if clients on this host may read memory in place.
    """

    store: BlockStore
    read_only: bool
    berths: int
    berth_bytes: int
    proofs: Mapping[bytes | str, str]
    name: str = ""
    clients: dict[_Client, asyncio.Task[None]] = field(default_factory=dict)
    dropped: int = 0
    lent_bytes: int = 0
    memory: ClientMemory = field(init=False)
    access: StoreAccess = field(init=False)
    slab_bytes: int = 0

    def __post_init__(self) -> None:
        self.memory = ClientMemory(self.berth_bytes)
        self.access = access_to(self.store)

    def lend(self, nbytes: int) -> bool:
        """Count bytes of pinned slots; return False if they would exceed the limit."""
        size_bytes = self.access.tiers.memory.counts.size_bytes
        if nbytes > 0 and self.lent_bytes + nbytes > size_bytes // STORE_LENT_SHARE:
            return False
        self.lent_bytes += nbytes
        return True

    def proved(self, proof: bytes | str) -> str | None:
        """Return the tenant of a proof; "" for the operator, None for nobody."""
        return self.proofs.get(proof, self.proofs.get(ANYBODY))

    def welcome(self, tenant: str, version: int) -> Welcome:
        """Return the welcome for a new client, which may be a tenant.

        ``version`` is the version that both sides support, or 0.
        """
        tiers = self.access.tiers
        mine = [one for one in tiers.namespaces.values() if one.tenant == tenant]
        texts = [
            NamespaceText(one.group, one.spec.to_pairs())
            for one in mine[:STORE_NAMESPACES_TOLD]
        ]
        return Welcome(
            version=version or VERSIONS[1],
            durable=any(tier.durable for tier in tiers.below),
            read_only=self.read_only,
            requests=STORE_REQUESTS_MAX,
            berths=self.berths,
            berth_bytes=self.berth_bytes,
            namespaces=tuple(texts),
            slab_bytes=self.slab_bytes,
            alone=not tiers.below,
        )

    def report(self, number: int, tenant: str) -> StatsReport:
        """Return the server's numbers; a tenant gets only its own."""
        store = self.store
        errors = self.store.report
        tenants = [
            TenantRow(
                name,
                one.counters,
                tuple((_name(tier), use) for tier, use in one.tiers.items()),
            )
            for name, one in store.tenant_stats().items()
            if tenant in ("", name)
        ]
        rows = [
            TierRow(_name(name), sayable(errors[name]), stats)
            for name, stats in store.stats().items()
            if not tenant
        ]
        clients = [client.row() for client in self.clients]
        clients = [row for row in clients if tenant in ("", row.tenant)]
        return StatsReport(
            number=number,
            name=self.name,
            read_only=self.read_only,
            tiers=tuple(rows),
            clients=tuple(clients[:STORE_CLIENTS_MAX]),
            dropped=0 if tenant else self.dropped,
            tenants=tuple(tenants),
        )


def _name(tier: str) -> str:
    """Return a tier's name for clients, without its path."""
    return sayable(tier)[:NAME_CHARS_MAX]
