"""Communicators as Prometheus metrics.

>>> from prometheus_client import REGISTRY
>>> REGISTRY.register(CommunicatorCollector(comm))

Numbers are read when Prometheus asks and nothing is counted twice, so a scrape costs
what reading them costs. Names follow the conventions of Prometheus: a unit, ``_total``
for what only grows.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvwire import Communicator

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
_OUTCOMES: Final = ("complete", "partial", "failed")


class CommunicatorCollector(Collector):
    """One communicator, under the label ``communicator`` with its name.

    Args:
        communicator: Which one. It must not be closed while it is registered.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def describe(self) -> list[Metric]:
        """Nothing: names are known without asking a communicator for its numbers."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The numbers of now. From any thread: each is read once."""
        communicator = self._communicator
        name, counters = communicator.name, communicator.counters
        for metric, text, field in _COUNTS:
            count = CounterMetricFamily(metric, text, labels=["communicator"])
            count.add_metric([name], getattr(counters, field))
            yield count
        ends = CounterMetricFamily(
            "kvwire_transfers", "KV transfer ends", labels=["communicator", "outcome"]
        )
        for outcome in _OUTCOMES:
            ends.add_metric([name, outcome], getattr(counters, f"transfers_{outcome}"))
        yield ends
        open_now = GaugeMetricFamily(
            "kvwire_open_connections",
            "Connections open now, by the transport of their data",
            labels=["communicator", "transport"],
        )
        live = communicator.live_connections
        for transport, number in collections.Counter(c.transport for c in live).items():
            open_now.add_metric([name, transport], number)
        yield open_now
        waiting = GaugeMetricFamily(
            "kvwire_quarantined_bytes",
            "Bytes nobody wants any more that a transport may still touch",
            labels=["communicator"],
        )
        waiting.add_metric([name], communicator.quarantined_bytes)
        yield waiting
