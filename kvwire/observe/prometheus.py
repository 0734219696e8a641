"""Communicators as Prometheus metrics.

>>> from prometheus_client import REGISTRY
>>> REGISTRY.register(CommunicatorCollector(comm))

The numbers are read when Prometheus scrapes, and are not kept a second time. Names
follow Prometheus's conventions: a unit, and ``_total`` for counters.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvwire import Communicator
from kvwire.endpoint.communicator import services_of
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

# Exported fields of Counters, each with its description; the field ends the metric's
# name.
_COUNTS: Final = {
    "connections": "Connections made by either side",
    "connections_lost": "Connections lost, not closed",
    "lanes_raised": "Lanes that came up",
    "lanes_failed": "Lanes that failed to come up, or broke",
    "lanes_restored": "Lanes raised again after a break",
    "transport_fallbacks": (
        "Times that data moved to a transport that was not the preferred one"
    ),
    "sent_bytes": "KV bytes that consumers have acknowledged",
    "received_bytes": "KV bytes landed and verified",
}
# Name, description, and field of TransferDistributions.
_DISTRIBUTIONS: Final = (
    (
        "kvwire_transfer_exposed_seconds",
        "Time of a KV transfer, without waiting for its peer or for compute",
        "exposed",
    ),
    (
        "kvwire_transfer_queue_seconds",
        "Time that a KV transfer waited for its peer",
        "queue",
    ),
    ("kvwire_transfer_bytes", "Landed KV bytes of a transfer", "nbytes"),
)
_OUTCOMES: Final = ("complete", "partial", "failed")
# Exported properties of the communicator.
_GAUGES: Final = {
    "quarantined_bytes": "Bytes of ended transfers that a transport may still touch",
    "open_transfers": "KV transfers without an outcome",
}


class CommunicatorCollector(Collector):
    """Collects one communicator's numbers, labelled with its name.

    Args:
        communicator: The communicator; do not close it while it is registered. The
            distributions count transfers that begin from now on, so make this on the
            communicator's loop.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._distributions = TransferDistributions()
        communicator.watchers.add(self._distributions)

    def describe(self) -> list[Metric]:
        """Return nothing, since the metrics have fixed names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current numbers. From any thread."""
        communicator = self._communicator
        name = communicator.name
        counters = communicator.counters
        labels = ["communicator"]
        live = communicator.live_connections
        yield from families(
            CounterMetricFamily, "kvwire_", _COUNTS, labels, [((name,), counters)]
        )
        ends = CounterMetricFamily(
            "kvwire_transfers", "Ended KV transfers", labels=[*labels, "outcome"]
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
        yield from families(
            GaugeMetricFamily, "kvwire_", _GAUGES, labels, [((name,), communicator)]
        )
        unreceived = GaugeMetricFamily(
            "kvwire_unreceived_messages",
            "Messages that have arrived or were announced, but have no receive",
            labels=labels,
        )
        unreceived.add_metric([name], sum(sum(c.unreceived.values()) for c in live))
        yield unreceived
        yield from self._certificate(name)
        yield from self._by_peer(name)
        for metric, text, field in _DISTRIBUTIONS:
            histogram = HistogramMetricFamily(metric, text, labels=labels)
            found: Distribution = getattr(self._distributions, field)
            histogram.add_metric([name], found.buckets, found.total)
            yield histogram

    def _certificate(self, name: str) -> Iterator[Metric]:
        """Yield the certificate's validity; nothing unless trust is ``mtls``."""
        found = services_of(self._communicator).certificate
        for field, verb in (("not_before", "begins"), ("not_after", "ends")):
            family = GaugeMetricFamily(
                f"kvwire_certificate_{field}_timestamp_seconds",
                f"When the certificate's validity {verb}; only with trust mtls",
                labels=["communicator"],
            )
            if found is not None and math.isfinite(getattr(found, field)):
                family.add_metric([name], getattr(found, field))
            yield family

    def _by_peer(self, name: str) -> Iterator[Metric]:
        """Yield the ended transfers by peer; the number of labels is bounded."""
        labels = ["communicator", "peer", "role", "outcome"]
        ends = CounterMetricFamily(
            "kvwire_peer_transfers",
            'Ended KV transfers by peer; "other" beyond 64 peers',
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


def families(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    prefix: str,
    rows: Mapping[str, str],
    labels: Sequence[str],
    sources: Iterable[tuple[tuple[str, ...], object]],
) -> Iterator[Metric]:
    """Yield one metric per row: a field of every source, with its labels."""
    for field, text in rows.items():
        family = kind(prefix + field, text, labels=labels)
        for values, source in sources:
            family.add_metric(values, getattr(source, field))
        yield family
