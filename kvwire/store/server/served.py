"""What the sessions of one store server have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvwire.limits import STORE_LENT_SHARE, STORE_NAMESPACES_TOLD, STORE_REQUESTS_MAX
from kvwire.store.server.messages import VERSION, NamespaceText, StatsReport, Welcome
from kvwire.store.store import BlockStore
from kvwire.types import PeerInfo


@dataclass(slots=True)
class ServedStore:
    """Holds a store that is served, and how. One event loop.

    Attributes:
        store: The store.
        read_only: Clients may get and not put.
        berths: How many requests of one client may move blocks at once.
        berth_bytes: The most that one of them moves.
        report: Returns what is there and what has happened, for a request's number and
            whoever asks.
        proofs: Tenants by what proves them: the id of a key, or an identity.
        dropped: Clients that broke a rule and were let go of.
        lent_bytes: Of slots that are pinned to be sent.
    """

    store: BlockStore
    read_only: bool
    berths: int
    berth_bytes: int
    report: Callable[[int, str], StatsReport]
    proofs: Mapping[bytes | str, str] = field(default_factory=dict)
    dropped: int = 0
    lent_bytes: int = 0

    def lend(self, nbytes: int) -> bool:
        """Count slots that are pinned to be sent; False if there were too many."""
        size_bytes = self.store._tiers.memory.counts.size_bytes  # noqa: SLF001
        if nbytes > 0 and self.lent_bytes + nbytes > size_bytes // STORE_LENT_SHARE:
            return False
        self.lent_bytes += nbytes
        return True

    def tenant_of(self, peer: PeerInfo) -> str:
        """Return which tenant a client has proved to be; "" if it is none."""
        return self.proofs.get(peer.identity or peer.key_id, "")

    def welcome(self, tenant: str) -> Welcome:
        """Return what a new client, of a tenant or none, has to know."""
        tiers = self.store._tiers  # noqa: SLF001 - the library's own
        mine = [one for one in tiers.namespaces.values() if one.tenant == tenant]
        texts = [
            NamespaceText(one.group, one.spec.to_pairs())
            for one in mine[:STORE_NAMESPACES_TOLD]
        ]
        return Welcome(
            version=VERSION,
            durable=any(tier.durable for tier in tiers.below),
            read_only=self.read_only,
            requests=STORE_REQUESTS_MAX,
            berths=self.berths,
            berth_bytes=self.berth_bytes,
            namespaces=tuple(texts),
            deletes=True,
        )
