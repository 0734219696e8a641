"""The proxy's view of itself and its engines: ``/metrics``, ``/fleet`` and ``/top``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvwire.extras import needed_by
from kvwire.integrations.vllm.proxy.admission import Admission, RetryBudget
from kvwire.integrations.vllm.proxy.dispatch import ClientRequest
from kvwire.integrations.vllm.proxy.fleet import EngineFleet
from kvwire.limits import SNAPSHOT_ROWS_MAX
from kvwire.observe.page import page_data
from kvwire.observe.view import (
    Column,
    Marked,
    Row,
    TopTable,
    TopView,
    Wait,
    waits_table,
)

with needed_by("the proxy", extra="vllm"):
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector


@dataclass(slots=True)
class ProxyState:
    """The numbers that a proxy shows."""

    fleet: EngineFleet
    admission: Admission
    budget: RetryBudget
    ignored: Callable[[], int] = lambda: 0  # the number of unusable directory entries
    # Open requests, oldest first. bounded: PROXY_RUNNING_MAX and PROXY_WAITING_MAX
    requests: dict[ClientRequest, None] = field(default_factory=dict)
    # Answers begun, by status.
    answered: Counter[int] = field(default_factory=Counter)
    # Results of streams that should continue at another engine: `"moved"`, `"stayed"`,
    # or `"recovered"` from an engine that died; and `"regained"` of those that decode
    # did not continue behind prefill's first token.
    moves: Counter[str] = field(default_factory=Counter)
    # Requests by the first token's sender: `"prefill"`, or why decode sends it.
    first_tokens: Counter[str] = field(default_factory=Counter)


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
            ("first_tokens", _FIRST, "way", state.first_tokens),
        ):
            metric = CounterMetricFamily(f"kvwire_proxy_{name}", text, labels=[label])
            for key, number in sorted(counted.items()):
                metric.add_metric([str(key)], number)
            yield metric
        budget = state.budget
        admitted = state.admission
        for name, text, family, value in (
            ("retries", "Tries beyond a request's first", _COUNTER, budget.spent),
            ("retries_refused", _REFUSED, _COUNTER, budget.refused),
            ("rejected", "Requests rejected with 429", _COUNTER, admitted.rejected),
            ("records_ignored", _IGNORED, _COUNTER, state.ignored()),
            ("running", "Requests running on an engine", _GAUGE, admitted.running),
            ("waiting", "Requests that wait for their turn", _GAUGE, admitted.waiting),
        ):
            yield family(f"kvwire_proxy_{name}", text, value=value)
        now = state.fleet.clock()
        engines = state.fleet.engines
        labels = ("engine", "role")
        for name, (family, text) in _OF_ENGINES.items():
            metric = family(f"kvwire_proxy_engine_{name}", text, labels=labels)
            for one in engines:
                value = one.state(now) == "up" if name == "up" else getattr(one, name)
                metric.add_metric([one.url, one.role], value)
            yield metric


_COUNTER: Final[type[Any]] = CounterMetricFamily
_GAUGE: Final[type[Any]] = GaugeMetricFamily
_FIRST: Final = "Requests by the first token's sender: prefill, or why decode sends it"
_REFUSED: Final = "Tries beyond the budget, on one healthy engine or on none"
_IGNORED: Final = "Entries of the directory that could not be used"
_OF_ENGINES: Final[dict[str, tuple[type[Any], str]]] = {
    "up": (_GAUGE, "Whether an engine accepts requests"),
    "running": (_GAUGE, "Requests from this proxy that run on an engine"),
    "load": (_GAUGE, "Load that an engine reports, from 0 to 1"),
    "failed": (_COUNTER, "Requests that an engine has failed since it started"),
    "computes_twice": (_GAUGE, "Whether both engines compute prompts that they share"),
}


def fleet_view(state: ProxyState) -> dict[str, Any]:
    """Return each engine's state, and each request's reason for waiting."""
    now = state.fleet.clock()
    engines = [
        {
            "url": one.url,
            "role": one.role,
            "state": one.state(now),
            "model": one.model,
            "running": one.running,
            "answered": one.answered,
            "failed": one.failed,
            "load": one.load,
            "transports": one.transports,
            "labels": one.labels,
            "findings": [asdict(finding) for finding in one.shared.findings],
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


# Anybody may read the page, so its cost does not grow with its readers.
_SHOWN_S: Final = 0.5


class FleetPage:
    """Collects the data of the page, at most twice a second for all readers."""

    def __init__(self, state: ProxyState) -> None:
        self._state = state
        self._until = -math.inf
        self._data = page_data({})

    def data(self) -> tuple[Mapping[str, str], bytes]:
        """Return the page's data, with the headers of the answer."""
        now = self._state.fleet.clock()
        if now >= self._until:
            self._until = now + _SHOWN_S
            self._data = page_data(page_view(self._state))
        return self._data


def page_view(state: ProxyState) -> TopView:
    """Return the data of ``/fleet`` as tables, for the page."""
    fleet = fleet_view(state)
    admitted = state.admission
    notes = [
        f"{engine['url']}: {finding['text']}"
        for engine in fleet["engines"]
        for finding in engine["findings"]
        if finding["state"] != "ok"
    ]
    if ignored := state.ignored():
        notes.append(f"{ignored:,} entries of the directory could not be used")
    name = f"proxy, {admitted.running:,} running and {admitted.waiting:,} waiting"
    engines = fleet["engines"]
    requests = sorted(fleet["requests"], key=lambda asked: -asked["for_s"])
    up = {engine["url"]: engine["state"] == "up" for engine in engines}
    waits = (
        Wait(
            f"requests of {asked['path']}",
            ", ".join(asked["engines"]) or "the proxy",
            asked["path"],
            asked["for_s"],
            f"it waits for {asked['waits_for']}",
            alarm=not all(up.get(url, False) for url in asked["engines"]),
        )
        for asked in requests
    )
    tables = (waits_table(waits), _engines(engines), _requests(requests))
    return TopView(name, tables, tuple(notes))


def _engines(engines: Sequence[Mapping[str, Any]]) -> TopTable:
    rows = [
        Row.of(
            engine["url"],
            engine["url"],
            engine["role"],
            Marked(engine["state"], alarm=engine["state"] in _TROUBLED),
            Marked(str(engine["running"]), plot=engine["running"]),
            Marked(f"{engine['load']:.0%}", share=engine["load"]),
            f"{engine['answered']:,}",
            f"{engine['failed']:,}",
            ", ".join(engine["transports"]),
            ", ".join(f"{key}={value}" for key, value in engine["labels"].items()),
        )
        for engine in engines
    ]
    return TopTable(
        "engines",
        "Engines",
        (
            Column("engine"),
            Column("role"),
            Column("state", "starting, up, slow, draining or down"),
            Column("running", "running requests from this proxy", number=True),
            Column("load", "the load that it reports", number=True),
            Column("answered", number=True),
            Column("failed", number=True),
            Column("over", "transports that can carry KV there"),
            Column("labels"),
        ),
        tuple(rows),
    )


def _requests(requests: Sequence[Mapping[str, Any]]) -> TopTable:
    rows = [
        Row.of(
            str(number),
            asked["path"],
            f"{asked['for_s']:.1f} s",
            asked["waits_for"],
            ", ".join(asked["engines"]),
        )
        for number, asked in enumerate(requests[:SNAPSHOT_ROWS_MAX])
    ]
    return TopTable(
        "requests",
        "Requests, the oldest first",
        (
            Column("path"),
            Column("age", number=True),
            Column("waits for", "what comes next"),
            Column("engines"),
        ),
        tuple(rows),
        len(requests) if len(requests) > len(rows) else 0,
    )


# States in which an engine takes no request, and nobody has asked for that.
_TROUBLED: Final = ("down", "slow")
