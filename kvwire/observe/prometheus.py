"""Communicators as Prometheus metrics.

>>> from prometheus_client import REGISTRY
>>> collector = CommunicatorCollector(comm)
>>> REGISTRY.register(collector)
>>> collector.add(another)

The numbers are read when Prometheus scrapes, and are not kept a second time. Names
follow Prometheus's conventions: a unit, and ``_total`` for counters.
"""

from __future__ import annotations

import collections
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Generic, TypeVar

from kvwire import Communicator, UsageError
from kvwire.extras import needed_by
from kvwire.observe.distributions import Distribution, TransferDistributions
from kvwire.spi import certificate_of

with needed_by("kvwire.observe.prometheus", extra="metrics"):
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector

T = TypeVar("T")
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


class SourcesCollector(Collector, ABC, Generic[T]):
    """Collects the numbers of several sources, each with a name as a label.

    A registry needs one collector for all sources of a kind: each metric may be there
    once. A second collector is refused by the registry.
    """

    def __init__(self) -> None:
        self._sources: dict[str, T] = {}

    def _add(self, name: str, source: T, what: str) -> None:
        if name in self._sources:
            raise UsageError(
                f"two {what} of one collector are called {name!r}; give each its own "
                "name, which is a label of its numbers"
            )
        self._sources = {**self._sources, name: source}

    def remove(self, name: str) -> None:
        """Collect no more of the source with this name, before it is closed."""
        self._sources = {k: v for k, v in self._sources.items() if k != name}

    def describe(self) -> list[Metric]:
        """Return every metric, so that a registry knows their names."""
        return list(self.collect())

    def collect(self) -> Iterator[Metric]:
        """Yield the current numbers. From any thread."""
        found: dict[str, Metric] = {}
        for name, source in self._sources.items():
            for family in self._families(name, source):
                found.setdefault(family.name, family)
                if found[family.name] is not family:
                    found[family.name].samples += family.samples
        yield from found.values()

    @abstractmethod
    def _families(self, name: str, source: T) -> Iterator[Metric]:
        """Yield the current numbers of one source."""


class CommunicatorCollector(
    SourcesCollector[tuple[Communicator, TransferDistributions]]
):
    """Collects numbers of communicators, each labelled with its name.

    Args:
        communicator: The first one; see :meth:`add`.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self.add(communicator)

    def add(self, communicator: Communicator) -> None:
        """Collect another communicator's numbers as well.

        Remove it before you close it. The distributions count transfers that begin from
        now on, so call this on the communicator's loop.

        Raises:
            UsageError: Another one has its name.
        """
        distributions = TransferDistributions()
        source = communicator, distributions
        self._add(communicator.name, source, "communicators")
        communicator.watchers.add(distributions)

    def _families(
        self, name: str, source: tuple[Communicator, TransferDistributions]
    ) -> Iterator[Metric]:
        communicator, distributions = source
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
        yield from _certificate(communicator)
        yield from _by_peer(name, distributions)
        for metric, text, field in _DISTRIBUTIONS:
            histogram = HistogramMetricFamily(metric, text, labels=labels)
            found: Distribution = getattr(distributions, field)
            histogram.add_metric([name], found.buckets, found.total)
            yield histogram


def _certificate(communicator: Communicator) -> Iterator[Metric]:
    """Yield the certificate's validity; nothing unless trust is ``mtls``."""
    found = certificate_of(communicator)
    for field, event in (
        ("not_before", "the certificate's validity begins"),
        ("not_after", "the validity of the certificate or of its CA ends"),
    ):
        family = GaugeMetricFamily(
            f"kvwire_certificate_{field}_timestamp_seconds",
            f"When {event}; only with trust mtls",
            labels=["communicator"],
        )
        if found is not None and math.isfinite(getattr(found, field)):
            family.add_metric([communicator.name], getattr(found, field))
        yield family


def _by_peer(name: str, distributions: TransferDistributions) -> Iterator[Metric]:
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
    for key, (count, nbytes) in sorted(distributions.peers.copy().items()):
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
    """Yield one metric per row: a field of every source, with its labels.

    A source in which the field is None does not count it, and is left out.
    """
    for field, text in rows.items():
        family = kind(prefix + field, text, labels=labels)
        for values, source in sources:
            if (number := getattr(source, field)) is not None:
                family.add_metric(values, number)
        yield family
