"""What a scrape sees of a communicator."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

import kvwire
from kvwire.observe.prometheus import CommunicatorCollector, StoreCollector
from kvwire.testing.harness import loopback
from tests.scenarios.world import SPEC, Memory


async def test_a_scrape_shows_what_has_happened() -> None:
    async with loopback(name="one") as pair:
        registry = CollectorRegistry()
        registry.register(CommunicatorCollector(pair.a))
        labels = {"communicator": "one"}
        assert registry.get_sample_value("kvwire_connections_total", labels) == 1
        where = {**labels, "transport": "inproc"}
        assert registry.get_sample_value("kvwire_open_connections", where) == 1

        out = pair.b.publish("x", Memory().cache, [0, 1])
        out.ready()
        out.finish()
        inc = pair.ab.pull("x", Memory().cache, [2, 3])
        outcome = await inc
        got = registry.get_sample_value("kvwire_received_bytes_total", labels)
        assert got == outcome.nbytes > 0
        ended = {**labels, "outcome": "complete"}
        assert registry.get_sample_value("kvwire_transfers_total", ended) == 1
        failed = {**labels, "outcome": "failed"}  # it is there before there is one
        assert registry.get_sample_value("kvwire_transfers_total", failed) == 0
        assert (await out).complete
        assert pair.b.counters.sent_bytes == outcome.nbytes
        await inc.drained()
        assert registry.get_sample_value("kvwire_quarantined_bytes", labels) == 0


async def test_failed_transfers_and_lost_connections_are_counted() -> None:
    async with loopback() as pair:
        inc = pair.ab.pull("never", Memory().cache, [0])
        inc.abort("not wanted any more")
        assert not (await inc).complete
        pair.ab.abort("gone")
        await pair.ba.wait_closed()
        assert pair.a.counters.transfers_failed == 1
        assert pair.a.counters.connections_lost == 1


async def test_a_scrape_shows_a_store_and_its_tiers(tmp_path: Path) -> None:
    memory, disk = "memory:1MiB", f"disk:{tmp_path}?size=1MiB"
    hashes = [bytes([i]) * 32 for i in range(3)]
    async with kvwire.BlockStore.open([memory, disk]) as store:
        registry = CollectorRegistry()
        registry.register(StoreCollector(store, "cache"))
        await store.put(hashes[:2], Memory().cache, [0, 1])
        await store.put(hashes[:2], Memory().cache, [0, 1])
        await store.get(hashes, Memory().cache, [0, 1, 2])

        def value(metric: str, **labels: str) -> float | None:
            return registry.get_sample_value(metric, {"store": "cache", **labels})

        assert value("kvwire_store_puts_total") == 2
        assert value("kvwire_store_stored_blocks_total") == 2
        assert value("kvwire_store_present_blocks_total") == 2
        assert value("kvwire_store_hit_blocks_total") == 2
        assert value("kvwire_store_missed_blocks_total") == 1
        assert value("kvwire_store_got_bytes_total") == 2 * SPEC.block_bytes
        assert value("kvwire_store_written_blocks_total", tier=disk) == 2
        assert value("kvwire_store_blocks", tier=memory) == 2
        assert value("kvwire_store_trouble", tier=disk) == 0


async def test_a_scrape_shows_what_each_tenant_has() -> None:
    tier = "memory:1MiB"
    async with kvwire.BlockStore.open([tier], tenants=["t?quota=64KiB"]) as store:
        registry = CollectorRegistry()
        registry.register(StoreCollector(store, "cache"))
        await store.put([b"a", b"b"], Memory().cache, [0, 1], tenant="t")
        of = {"store": "cache", "tenant": "t"}
        stored = registry.get_sample_value(
            "kvwire_store_tenant_stored_blocks_total", of
        )
        assert stored == 2
        of["tier"] = tier
        quota = registry.get_sample_value("kvwire_store_tenant_quota_bytes", of)
        assert quota == 64 * 1024
        used = registry.get_sample_value("kvwire_store_tenant_used_bytes", of)
        assert used == store.tenant_stats()["t"].tiers[tier].used_bytes > 0
