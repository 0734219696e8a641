"""``/metrics`` and ``/health`` of a store, and what a strict reader sees of them."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvwire import ListenError, UsageError
from kvwire_store import BlockStore, StoreServer
from kvwire_store.metrics_server import MetricsServer
from kvwire_store.prometheus import StoreCollector
from packages.store.tests.fakes import FakeTier
from packages.store.tests.files import store_on
from tests.support.caches import Memory


def fetched(server: MetricsServer, path: str) -> tuple[int, str]:
    where = server.url.removesuffix("/metrics") + path
    try:
        with urllib.request.urlopen(where, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


async def test_metrics_and_health_are_answered() -> None:
    async with BlockStore.open(["memory:1MiB"]) as store:
        with MetricsServer(store, "127.0.0.1:0") as server:
            status, body = await asyncio.to_thread(fetched, server, "/metrics")
            assert status == HTTPStatus.OK
            assert "kvwire_store_puts_total" in body
            status, body = await asyncio.to_thread(fetched, server, "/health?why")
            assert (status, json.loads(body)["status"]) == (HTTPStatus.OK, "ok")
            status, body = await asyncio.to_thread(fetched, server, "/")
            assert (status, "/metrics" in body) == (HTTPStatus.NOT_FOUND, True)


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
async def test_the_numbers_of_a_communicator_may_be_there_too(host: str) -> None:
    async with (
        BlockStore.open(["memory:1MiB"]) as store,
        StoreServer(store, "127.0.0.1:0", name="served") as served,
    ):
        communicator = served.communicator
        with MetricsServer(store, f"{host}:0", communicator) as server:
            _, body = await asyncio.to_thread(fetched, server, "/metrics")
    assert 'kvwire_connections_total{communicator="served"} 0.0' in body
    assert "kvwire_store_puts_total" in body


async def test_a_loop_that_is_stuck_is_not_healthy() -> None:
    async with BlockStore.open(["memory:1MiB"]) as store:
        with MetricsServer(store, "127.0.0.1:0") as server:
            # Called from the loop itself, which so has no turn to give.
            status, _, body = server.get("/health")
            assert status == HTTPStatus.SERVICE_UNAVAILABLE
            assert json.loads(body)["status"] == "stuck"


async def test_tiers_in_trouble_are_named() -> None:
    tier = FakeTier("disk")
    tier.error = "no space left"
    async with store_on(tier) as store:
        with MetricsServer(store, "127.0.0.1:0") as server:
            status, body = await asyncio.to_thread(fetched, server, "/health")
    assert status == HTTPStatus.OK
    found = json.loads(body)
    assert found == {"status": "degraded", "trouble": {"disk": "no space left"}}


async def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        async with BlockStore.open(["memory:1MiB"]) as store:
            with pytest.raises(ListenError, match=where):
                MetricsServer(store, where)


async def test_a_registry_has_one_collector_for_all_stores(tmp_path: Path) -> None:
    """The second one has tenants, and a disk; a strict reader takes them together."""
    tiers = ["memory:1MiB", f"disk:{tmp_path}?size=1MiB"]
    async with (
        BlockStore.open(["memory:1MiB"]) as one,
        BlockStore.open(tiers, tenants=["t?quota=64KiB"]) as two,
    ):
        await two.put([b"a" * 32], Memory().cache, [0])
        registry = CollectorRegistry()
        collector = StoreCollector(one, "one")
        registry.register(collector)
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            registry.register(StoreCollector(two, "two"))
        collector.add(two, "two")
        with pytest.raises(UsageError, match=r"stores .* are called 'two'"):
            collector.add(one, "two")
        text = generate_latest(registry).decode()  # type: ignore[no-untyped-call]
        families = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        found = {family.name: family for family in families}
        stored = found["kvwire_store_stored_blocks"].samples
        assert {s.labels["store"]: s.value for s in stored} == {"one": 0, "two": 1}
        assert {
            sample.labels["tenant"]
            for sample in found["kvwire_store_tenant_quota_bytes"].samples
        } >= {"t"}
