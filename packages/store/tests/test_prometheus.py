"""What a scrape sees of stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvwire import UsageError
from kvwire_store import BlockStore
from kvwire_store.prometheus import StoreCollector
from tests.support.caches import Memory


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
