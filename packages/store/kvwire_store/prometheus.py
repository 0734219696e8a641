"""Stores as Prometheus metrics.

>>> from prometheus_client import REGISTRY
>>> REGISTRY.register(StoreCollector(store))

The numbers are read when Prometheus scrapes, and are not kept a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from kvwire.extras import needed_by
from kvwire.observe.prometheus import SourcesCollector, families
from kvwire_store.store import BlockStore

with needed_by("kvwire_store.prometheus", extra="metrics"):
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        Metric,
    )

# Exported fields of StoreCounters.
_STORE_COUNTS: Final = {
    "puts": "Ended puts",
    "gets": "Ended gets",
    "stored_blocks": "Blocks of puts that were new",
    "present_blocks": "Blocks of puts that were already stored",
    "refused_blocks": "Blocks of puts that were not stored",
    "hit_blocks": "Blocks of gets that landed",
    "missed_blocks": "Blocks of gets that did not land",
    "put_bytes": "KV bytes of puts, new or not",
    "got_bytes": "KV bytes that gets have read",
}
# Exported fields of TierStats, for each tier.
_TIER_COUNTS: Final = {
    "read_blocks": "Blocks read from a tier",
    "written_blocks": "Blocks that a tier has stored",
    "evicted_blocks": "Blocks evicted to make room",
    "damaged_blocks": "Blocks found to be damaged",
    "failed_blocks": "Blocks that could not be read or written",
}
_TIER_GAUGES: Final = {
    "blocks": "Blocks in a tier",
    "used_bytes": "Bytes that blocks use in a tier",
    "size_bytes": "Bytes that blocks may use in a tier",
}
# Exported fields of StoreCounters and of TenantUse, for each tenant. A store's tenants
# are fixed when it is opened, so their number is bounded.
_TENANT_COUNTS: Final = {
    "hit_blocks": "Blocks of gets that landed",
    "missed_blocks": "Blocks of gets that did not land",
    "stored_blocks": "Blocks of puts that were new",
    "refused_blocks": "Blocks of puts that were not stored",
}
_TENANT_GAUGES: Final = {
    "used_bytes": "Bytes that a tenant uses in a tier",
    "quota_bytes": "Bytes that a tenant may use in a tier; 0: no limit",
    "pinned_bytes": "Bytes that are pinned",
    "evicted_blocks": "Blocks of a tenant evicted from a tier since it was opened",
}


class StoreCollector(SourcesCollector[BlockStore]):
    """Collects numbers of stores, labelled ``store``, and ``tier`` for each tier.

    The label ``tenant`` has the tenant's name, or "" for blocks without a tenant.

    Args:
        store: The first store; see :meth:`add`.
        name: The value of its label ``store``.
    """

    def __init__(self, store: BlockStore, name: str = "") -> None:
        super().__init__()
        self.add(store, name)

    def add(self, store: BlockStore, name: str) -> None:
        """Collect another store's numbers as well.

        Raises:
            UsageError: Another store has this name.
        """
        self._add(name, store, "stores")

    def _families(self, name: str, source: BlockStore) -> Iterator[Metric]:
        count = partial(families, CounterMetricFamily)
        gauge = partial(families, GaugeMetricFamily)
        prefix = "kvwire_store_"
        labels = ["store", "tier"]
        yield from count(prefix, _STORE_COUNTS, ["store"], [((name,), source.counters)])
        tiers = [((name, tier), numbers) for tier, numbers in source.stats().items()]
        yield from count(prefix, _TIER_COUNTS, labels, tiers)
        yield from gauge(prefix, _TIER_GAUGES, labels, tiers)
        if tenants := source.tenant_stats():
            counts = [((name, tenant), one.counters) for tenant, one in tenants.items()]
            uses = [
                ((name, tier, tenant), use)
                for tenant, one in tenants.items()
                for tier, use in one.tiers.items()
            ]
            prefix += "tenant_"
            yield from count(prefix, _TENANT_COUNTS, ["store", "tenant"], counts)
            yield from gauge(prefix, _TENANT_GAUGES, [*labels, "tenant"], uses)
        trouble = GaugeMetricFamily(
            "kvwire_store_trouble", "Whether a tier has reported trouble", labels=labels
        )
        for tier, reason in source.report.items():
            trouble.add_metric([name, tier], bool(reason))
        yield trouble
