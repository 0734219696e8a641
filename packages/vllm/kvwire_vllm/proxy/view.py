"""The proxy's view of itself and its engines: ``/metrics`` and ``/fleet``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvwire_vllm.proxy.discovery import Discovery
from kvwire_vllm.proxy.dispatch import ClientRequest, Dispatcher
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.limits import PROXY_RUNNING_MAX


class TooMany(Exception):
    """Reports that the proxy has no room for a request now."""


@dataclass(slots=True)
class ProxyState:
    """The numbers that a proxy shows."""

    fleet: EngineFleet
    dispatcher: Dispatcher
    running_max: int = PROXY_RUNNING_MAX
    discovery: Discovery | None = None  # where engines announce themselves
    # Open requests, oldest first. bounded: PROXY_RUNNING_MAX
    requests: dict[ClientRequest, None] = field(default_factory=dict)
    # Answers begun, by status.
    answered: Counter[int] = field(default_factory=Counter)
    # Results of streams that should continue at another engine: `"moved"`, `"stayed"`,
    # or `"recovered"` from an engine that died.
    moves: Counter[str] = field(default_factory=Counter)
    running: int = 0  # requests that are read or answered
    rejected: int = 0  # requests refused because there were too many

    @property
    def ignored(self) -> int:
        """The number of unusable directory entries."""
        return self.discovery.ignored if self.discovery else 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count a request until it is answered.

        Raises:
            TooMany: There are as many as there may be.
        """
        if self.running >= self.running_max:
            self.rejected += 1
            raise TooMany(f"{self.running} requests are running; try again later")
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1


class ProxyCollector(Collector):
    """Collects a proxy's numbers for Prometheus."""

    def __init__(self, state: ProxyState) -> None:
        self._state = state

    def describe(self) -> list[Metric]:
        """Return nothing: the metrics have fixed names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current numbers. On the proxy's loop."""
        state = self._state
        for name, text, label, counted in (
            ("requests", "Requests answered, by status", "status", state.answered),
            ("moves", "Streams moved elsewhere, by outcome", "outcome", state.moves),
        ):
            metric = CounterMetricFamily(f"kvwire_proxy_{name}", text, labels=[label])
            for key, number in sorted(counted.items()):
                metric.add_metric([str(key)], number)
            yield metric
        retries = state.dispatcher.retries
        for name, text, family, value in (
            ("retries", "Tries beyond a request's first", _COUNTER, retries),
            ("rejected", "Requests rejected with 429", _COUNTER, state.rejected),
            ("records_ignored", _IGNORED, _COUNTER, state.ignored),
            ("running", "Requests that are read or answered", _GAUGE, state.running),
        ):
            yield family(f"kvwire_proxy_{name}", text, value=value)
        engines = state.fleet.engines
        labels = ("engine", "role")
        for name, (family, text) in _OF_ENGINES.items():
            metric = family(f"kvwire_proxy_engine_{name}", text, labels=labels)
            for one in engines:
                value = one.state == "up" if name == "up" else getattr(one, name)
                metric.add_metric([one.url, one.role], value)
            yield metric


_COUNTER: Final[type[Any]] = CounterMetricFamily
_GAUGE: Final[type[Any]] = GaugeMetricFamily
_IGNORED: Final = "Entries of the directory that could not be used"
_OF_ENGINES: Final[dict[str, tuple[type[Any], str]]] = {
    "up": (_GAUGE, "Whether an engine accepts requests"),
    "running": (_GAUGE, "Requests from this proxy that run on an engine"),
    "load": (_GAUGE, "Load that an engine reports, from 0 to 1"),
    "failed": (_COUNTER, "Requests that an engine has failed since it started"),
}


def fleet_view(state: ProxyState) -> dict[str, Any]:
    """Return the reason for waiting of each engine and each request."""
    now = state.fleet.clock()
    engines = [
        {
            "url": one.url,
            "role": one.role,
            "state": one.state,
            "waits_for": one.waits_for,
            "model": one.model,
            "running": one.running,
            "answered": one.answered,
            "failed": one.failed,
            "load": one.load,
            "transports": one.transports,
            "labels": one.labels,
        }
        for one in sorted(state.fleet.engines, key=lambda one: (one.role, one.url))
    ]
    requests = [
        {
            "path": asked.path,
            "for_s": round(now - asked.since, 3),
            "waits_for": asked.waits_for,
            "engines": asked.engines,
        }
        for asked in state.requests
    ]
    return {"engines": engines, "requests": requests}
