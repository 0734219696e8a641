"""What a proxy shows of itself and its engines: ``/metrics`` and ``/fleet``."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvwire.extras import needed_by
from kvwire.integrations.vllm.proxy.admission import Admission, RetryBudget
from kvwire.integrations.vllm.proxy.client import EngineClient, EngineFailed
from kvwire.integrations.vllm.proxy.dispatch import ClientRequest
from kvwire.integrations.vllm.proxy.engines import VllmEngine
from kvwire.integrations.vllm.proxy.fleet import EngineFleet
from kvwire.limits import PROXY_METRICS_BYTES_MAX
from kvwire.observe.page import Table, render, share

with needed_by("the proxy", extra="vllm"):
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector

# For all engines together: a page that waits for a sick one helps nobody.
_ASK_S: Final = 1.0
# Hits and what was looked for, of vLLM's own cache and of KV from elsewhere.
_HITS: Final = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
_FETCHED: Final = (
    "vllm:external_prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
)


@dataclass(slots=True)
class ProxyState:
    """Holds what a proxy shows."""

    fleet: EngineFleet
    admission: Admission
    budget: RetryBudget
    ignored: Callable[[], int] = lambda: 0  # entries of the directory that are no use
    # Those under way, oldest first. bounded: PROXY_RUNNING_MAX and PROXY_WAITING_MAX
    requests: dict[ClientRequest, None] = field(default_factory=dict)
    # Answers that were begun, by their status.
    answered: Counter[int] = field(default_factory=Counter)
    # How streams that were to go on elsewhere ended: `"moved"`, `"stayed"`, or
    # `"recovered"` from an engine that has died.
    moves: Counter[str] = field(default_factory=Counter)


class ProxyCollector(Collector):
    """Collects a proxy's numbers."""

    def __init__(self, state: ProxyState) -> None:
        self._state = state

    def describe(self) -> list[Metric]:
        """Return nothing: names are known without the numbers."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the numbers of now. On the proxy's loop."""
        state = self._state
        for name, text, label, counted in (
            ("requests", "Requests answered, by status", "status", state.answered),
            ("moves", "Streams sent elsewhere, by outcome", "outcome", state.moves),
        ):
            metric = CounterMetricFamily(f"kvwire_proxy_{name}", text, labels=[label])
            for key, number in sorted(counted.items()):
                metric.add_metric([str(key)], number)
            yield metric
        budget, admitted = state.budget, state.admission
        for name, text, family, value in (
            ("retries", "Tries beyond a request's first", _COUNTER, budget.spent),
            ("retries_refused", _REFUSED, _COUNTER, budget.refused),
            ("rejected", "Requests sent away with 429", _COUNTER, admitted.rejected),
            ("records_ignored", _IGNORED, _COUNTER, state.ignored()),
            ("running", "Requests that have an engine", _GAUGE, admitted.running),
            ("waiting", "Requests that wait for their turn", _GAUGE, admitted.waiting),
        ):
            yield family(f"kvwire_proxy_{name}", text, value=value)
        now, engines = state.fleet.clock(), state.fleet.engines
        labels = ("engine", "role")
        for name, (family, text) in _OF_ENGINES.items():
            metric = family(f"kvwire_proxy_engine_{name}", text, labels=labels)
            for one in engines:
                value = one.state(now) == "up" if name == "up" else getattr(one, name)
                metric.add_metric([one.url, one.role], value)
            yield metric


_COUNTER: Final[type[Any]] = CounterMetricFamily
_GAUGE: Final[type[Any]] = GaugeMetricFamily
_REFUSED: Final = "Tries that the budget had no room for"
_IGNORED: Final = "Entries of the directory that could not be used"
_OF_ENGINES: Final[dict[str, tuple[type[Any], str]]] = {
    "up": (_GAUGE, "Whether an engine takes requests"),
    "running": (_GAUGE, "Requests that an engine has of this proxy"),
    "load": (_GAUGE, "How busy an engine says it is, from 0 to 1"),
    "failed": (_COUNTER, "Requests that an engine has failed since it started"),
}


async def fleet_page(state: ProxyState, client: EngineClient) -> str:
    """Return the page about a proxy's engines and requests.

    Cancel safety: safe, it only looks.
    """
    engines = state.fleet.engines
    shares = await _shares(client, engines)
    # Requests that have come meanwhile are on the page.
    now = state.fleet.clock()
    budget, admission = state.budget, state.admission
    facts = [
        ("running", str(admission.running)),
        ("waiting", str(admission.waiting)),
        ("sent away", str(admission.rejected)),
        ("retries", f"{budget.spent}, {budget.refused} refused"),
        ("records ignored", str(state.ignored())),
        *((outcome, str(number)) for outcome, number in sorted(state.moves.items())),
    ]
    rows = [
        (
            engine.url,
            engine.role,
            engine.state(now),
            str(engine.running),
            f"{engine.load:.0%}",
            " ".join(engine.transports) or "-",
            engine.labels.get("carrying", "-"),
            *shares.get(engine, ("-", "-")),
            f"{engine.answered}, {engine.failed} failed",
            engine.model[:8] or "-",
        )
        for engine in sorted(engines, key=lambda one: (one.role, one.url))
    ]
    waiting = [
        (
            asked.path,
            f"{now - asked.since:.1f} s",
            asked.waits_for,
            " → ".join(asked.engines) or "-",
        )
        for asked in state.requests
    ]
    return render(
        "kvwire fleet",
        facts,
        [
            Table("Engines", _ENGINE_COLUMNS, rows, "no engine has been found"),
            Table("Requests under way", _REQUEST_COLUMNS, waiting),
        ],
    )


_ENGINE_COLUMNS: Final = (
    "engine",
    "role",
    "state",
    "running",
    "load",
    "can carry",
    "carrying",
    "cache hits",
    "KV fetched",
    "done",
    "model",
)
_REQUEST_COLUMNS: Final = ("request", "since", "waits for", "engines")


async def _shares(
    client: EngineClient, engines: Sequence[VllmEngine]
) -> dict[VllmEngine, tuple[str, str]]:
    """Ask engines for their hits; those that do not answer in time are left out."""
    asking = {asyncio.ensure_future(_share(client, one)): one for one in engines}
    if not asking:
        return {}
    try:
        done, _ = await asyncio.wait(asking, timeout=_ASK_S)
        return {asking[task]: found for task in done if (found := task.result())}
    finally:
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)


async def _share(client: EngineClient, engine: VllmEngine) -> tuple[str, str] | None:
    try:
        async with client.ask(engine, "/metrics") as said:
            if said.is_error:
                return None
            text = await said.body(PROXY_METRICS_BYTES_MAX)
        numbers = _sums(text.decode(errors="replace"))
    except (EngineFailed, ValueError):
        return None
    hits, fetched = ((numbers[a], numbers[b]) for a, b in (_HITS, _FETCHED))
    return share(*hits), share(*fetched)


def _sums(text: str) -> defaultdict[str, float]:
    """Add up the samples of the metrics that are looked at."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in (*_HITS, *_FETCHED):
            found[name] += float(line.rpartition(" ")[2])
    return found
