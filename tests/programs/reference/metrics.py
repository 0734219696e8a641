"""docs/reference/metrics.md: what Prometheus can ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.registry import Collector

import kvwire
import kvwire_store
from kvwire.observe.prometheus import CommunicatorCollector
from kvwire_store.prometheus import StoreCollector
from kvwire_vllm.proxy.client import EngineClient
from kvwire_vllm.proxy.dispatch import Dispatcher
from kvwire_vllm.proxy.fleet import EngineFleet
from kvwire_vllm.proxy.view import ProxyCollector, ProxyState
from tests.programs.reference import words


def page() -> str:
    return asyncio.run(_page())


async def _page() -> str:
    fleet = EngineFleet()
    proxy = ProxyState(fleet, Dispatcher(EngineClient(), fleet))
    async with (
        kvwire.open() as communicator,
        kvwire_store.BlockStore.open(["memory:1MiB"], tenants=["a"]) as store,
    ):
        return words.page(
            "metrics.md",
            _table(CommunicatorCollector(communicator)),
            _table(StoreCollector(store)),
            _table(ProxyCollector(proxy)),
        )


def _table(collector: Collector) -> str:
    return words.table(("name", "labels", ""), _rows(collector))


def _rows(collector: Collector) -> Iterator[tuple[str, str, str]]:
    for metric in collector.collect():
        suffix = "_total" if metric.type == "counter" else ""
        # A family without samples tells its labels nowhere else.
        labels: tuple[str, ...] = metric._labelnames  # type: ignore[attr-defined]
        yield (
            f"`{metric.name}{suffix}`",
            ", ".join(f"`{label}`" for label in labels),
            metric.documentation,
        )
