"""Communicators and stores as Prometheus metrics.

>>> from prometheus_client import REGISTRY
>>> REGISTRY.register(CommunicatorCollector(comm))
>>> REGISTRY.register(StoreCollector(store))

Numbers are read when Prometheus asks and nothing is counted twice, so a scrape costs
what reading them costs. Names follow the conventions of Prometheus: a unit, ``_total``
for what only grows.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvwire import BlockStore, Communicator
from kvwire.extras import needed_by
from kvwire.observe.distributions import Distribution, TransferDistributions

with needed_by("kvwire.observe.prometheus", extra="metrics"):
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector

# Name, what it counts, the field of Counters.
_COUNTS: Final = (
    ("kvwire_connections", "Connections made, by either side", "connections"),
    ("kvwire_connections_lost", "Connections lost, not closed", "connections_lost"),
    ("kvwire_lanes_raised", "Lanes that came up", "lanes_raised"),
    ("kvwire_lanes_failed", "Lanes that did not come up, or broke", "lanes_failed"),
    ("kvwire_lanes_restored", "Lanes raised again after a break", "lanes_restored"),
    (
        "kvwire_transport_fallbacks",
        "Times that data moved to a transport that was not the preferred one",
        "transport_fallbacks",
    ),
    ("kvwire_sent_bytes", "KV bytes that consumers have acknowledged", "sent_bytes"),
    ("kvwire_received_bytes", "KV bytes landed and verified", "received_bytes"),
)
# Name, what it shows, the field of TransferDistributions.
_DISTRIBUTIONS: Final = (
    (
        "kvwire_transfer_exposed_seconds",
        "Time of a KV transfer that waited neither for its peer nor for compute",
        "exposed",
    ),
    (
        "kvwire_transfer_queue_seconds",
        "Time that a KV transfer waited for its peer to come",
        "queue",
    ),
    ("kvwire_transfer_bytes", "KV bytes of a transfer that landed", "nbytes"),
)
_OUTCOMES: Final = ("complete", "partial", "failed")
# Name, what it shows, the field of Communicator.
_GAUGES: Final = (
    (
        "kvwire_quarantined_bytes",
        "Bytes nobody wants any more that a transport may still touch",
        "quarantined_bytes",
    ),
    ("kvwire_open_transfers", "KV transfers without an outcome", "open_transfers"),
)


class CommunicatorCollector(Collector):
    """Collects one communicator's numbers, labelled with its name.

    Args:
        communicator: Which one. It must not be closed while it is registered.
            Transfers that begin from here on are in the distributions; so make it on
            the communicator's loop.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._distributions = TransferDistributions()
        communicator.watchers.add(self._distributions)

    def describe(self) -> list[Metric]:
        """Return nothing: names are known without the numbers."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers of now. From any thread."""
        communicator = self._communicator
        name, counters = communicator.name, communicator.counters
        labels, live = ["communicator"], communicator.live_connections
        yield from _families(
            CounterMetricFamily, _COUNTS, labels, [((name,), counters)]
        )
        ends = CounterMetricFamily(
            "kvwire_transfers", "KV transfer ends", labels=[*labels, "outcome"]
        )
        for outcome in _OUTCOMES:
            ends.add_metric([name, outcome], getattr(counters, f"transfers_{outcome}"))
        yield ends
        open_now = GaugeMetricFamily(
            "kvwire_open_connections",
            "Connections open now, by the transport of their data",
            labels=[*labels, "transport"],
        )
        for transport, number in collections.Counter(c.transport for c in live).items():
            open_now.add_metric([name, transport], number)
        yield open_now
        yield from _families(
            GaugeMetricFamily, _GAUGES, labels, [((name,), communicator)]
        )
        unreceived = GaugeMetricFamily(
            "kvwire_unreceived_messages",
            "Messages that are here, or announced, and that nobody receives",
            labels=labels,
        )
        unreceived.add_metric([name], sum(sum(c.unreceived.values()) for c in live))
        yield unreceived
        yield from self._by_peer(name)
        for metric, text, field in _DISTRIBUTIONS:
            histogram = HistogramMetricFamily(metric, text, labels=labels)
            found: Distribution = getattr(self._distributions, field)
            histogram.add_metric([name], found.buckets, found.total)
            yield histogram

    def _by_peer(self, name: str) -> Iterator[Metric]:
        """Yield what has ended, by peer as far as that is bounded."""
        labels = ["communicator", "peer", "role", "outcome"]
        ends = CounterMetricFamily(
            "kvwire_peer_transfers",
            'KV transfer ends by peer; "other" beyond 64 peers',
            labels=labels,
        )
        moved = CounterMetricFamily(
            "kvwire_peer_bytes", "KV bytes that landed, by peer", labels=labels
        )
        for key, (count, nbytes) in sorted(self._distributions.peers.copy().items()):
            ends.add_metric([name, *key], count)
            moved.add_metric([name, *key], nbytes)
        yield ends
        yield moved


# Name, what it counts, the field of StoreCounters.
_STORE_COUNTS: Final = (
    ("kvwire_store_puts", "Puts that are over", "puts"),
    ("kvwire_store_gets", "Gets that are over", "gets"),
    ("kvwire_store_stored_blocks", "Blocks put that were new", "stored_blocks"),
    ("kvwire_store_present_blocks", "Blocks put that were there", "present_blocks"),
    ("kvwire_store_refused_blocks", "Blocks put and not kept", "refused_blocks"),
    ("kvwire_store_hit_blocks", "Blocks got that landed", "hit_blocks"),
    ("kvwire_store_missed_blocks", "Blocks got that did not", "missed_blocks"),
    ("kvwire_store_put_bytes", "KV bytes put, new or not", "put_bytes"),
    ("kvwire_store_got_bytes", "KV bytes that landed by gets", "got_bytes"),
)
# The same of a tier: fields of TierStats.
_TIER_COUNTS: Final = (
    ("kvwire_store_read_blocks", "Blocks that landed from a tier", "read_blocks"),
    ("kvwire_store_written_blocks", "Blocks a tier has taken", "written_blocks"),
    ("kvwire_store_evicted_blocks", "Blocks evicted for others", "evicted_blocks"),
    ("kvwire_store_damaged_blocks", "Blocks that were damaged", "damaged_blocks"),
    ("kvwire_store_failed_blocks", "Blocks not read or written", "failed_blocks"),
)
_TIER_GAUGES: Final = (
    ("kvwire_store_blocks", "Blocks in a tier", "blocks"),
    ("kvwire_store_used_bytes", "Bytes that blocks take in a tier", "used_bytes"),
    ("kvwire_store_size_bytes", "Bytes that they may take", "size_bytes"),
)


# The same of a tenant: fields of StoreCounters, and of TenantUse. Tenants are those
# that the store was opened with, so their number is bounded.
_TENANT_COUNTS: Final = (
    ("kvwire_store_tenant_hit_blocks", "Blocks got that landed", "hit_blocks"),
    ("kvwire_store_tenant_missed_blocks", "Blocks got that did not", "missed_blocks"),
    ("kvwire_store_tenant_stored_blocks", "Blocks put that were new", "stored_blocks"),
    (
        "kvwire_store_tenant_refused_blocks",
        "Blocks put and not kept",
        "refused_blocks",
    ),
)
_TENANT_GAUGES: Final = (
    ("kvwire_store_tenant_used_bytes", "Bytes of a tenant in a tier", "used_bytes"),
    ("kvwire_store_tenant_quota_bytes", "Bytes it may have; 0: any", "quota_bytes"),
    ("kvwire_store_tenant_pinned_bytes", "Bytes that are pinned", "pinned_bytes"),
    (
        "kvwire_store_tenant_evicted_blocks",
        "Blocks of a tenant evicted from a tier since it was opened",
        "evicted_blocks",
    ),
)


class StoreCollector(Collector):
    """Collects one store's numbers, labelled ``store``; its tiers ``tier``.

    Tenants are labelled ``tenant``, with "" for who is none.

    Args:
        store: Which one.
        name: The label's value.
    """

    def __init__(self, store: BlockStore, name: str = "") -> None:
        self._store = store
        self._name = name

    def describe(self) -> list[Metric]:
        """Return nothing: names are known without the numbers."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers of now. From any thread."""
        name, store = self._name, self._store
        whole = [((name,), store.counters)]
        yield from _families(CounterMetricFamily, _STORE_COUNTS, ["store"], whole)
        labels = ["store", "tier"]
        tiers = [((name, tier), numbers) for tier, numbers in store.stats().items()]
        yield from _families(CounterMetricFamily, _TIER_COUNTS, labels, tiers)
        yield from _families(GaugeMetricFamily, _TIER_GAUGES, labels, tiers)
        if tenants := store.tenant_stats():
            counts = [((name, tenant), one.counters) for tenant, one in tenants.items()]
            uses = [
                ((name, tier, tenant), use)
                for tenant, one in tenants.items()
                for tier, use in one.tiers.items()
            ]
            yield from _families(
                CounterMetricFamily, _TENANT_COUNTS, ["store", "tenant"], counts
            )
            yield from _families(
                GaugeMetricFamily, _TENANT_GAUGES, ["store", "tier", "tenant"], uses
            )
        trouble = GaugeMetricFamily(
            "kvwire_store_trouble", "Whether a tier has reported trouble", labels=labels
        )
        for tier, said in store.report.items():
            trouble.add_metric([name, tier], bool(said))
        yield trouble


def _families(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    rows: Sequence[tuple[str, str, str]],
    labels: Sequence[str],
    sources: Iterable[tuple[tuple[str, ...], object]],
) -> Iterator[Metric]:
    """Yield the metric of each row: a field of all sources, under their labels."""
    for metric, text, field in rows:
        family = kind(metric, text, labels=labels)
        for values, source in sources:
            family.add_metric(values, getattr(source, field))
        yield family
