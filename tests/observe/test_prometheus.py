"""What a scrape sees of a communicator."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

import kvwire
import kvwire_store
from kvwire.observe import distributions
from kvwire.observe.prometheus import CommunicatorCollector
from kvwire_store.prometheus import StoreCollector
from tests.support.caches import SPEC, Memory
from tests.support.certificates import NEAR, Authority, issue
from tests.support.pairs import connected


class Scrape:
    """What a collector says at the moment, of one communicator or store."""

    def __init__(self, collector: Collector, **labels: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._labels = labels

    def __call__(self, metric: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(metric, self._labels | labels)


def sources_of(registry: CollectorRegistry, label: str) -> set[str]:
    """Return a label's values, as a strict reader finds them."""
    text = generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    found = [*text_string_to_metric_families(text)]  # type: ignore[no-untyped-call]
    assert len(found) == len({family.name for family in found})
    return {sample.labels[label] for family in found for sample in family.samples}


async def test_a_scrape_shows_what_has_happened() -> None:
    async with connected("inproc", name="one") as pair:
        value = Scrape(CommunicatorCollector(pair.near), communicator="one")
        assert value("kvwire_connections_total") == 1
        assert value("kvwire_open_connections", transport="inproc") == 1
        out = pair.far.publish("x", Memory().cache, [0, 1])
        out.ready()
        out.finish()
        inc = pair.left.pull("x", Memory().cache, [2, 3])
        outcome = await inc
        assert value("kvwire_received_bytes_total") == outcome.nbytes > 0
        assert value("kvwire_transfers_total", outcome="complete") == 1
        # It is there before there is one.
        assert value("kvwire_transfers_total", outcome="failed") == 0
        assert (await out).complete
        assert pair.far.counters.sent_bytes == outcome.nbytes
        await inc.drained()
        assert value("kvwire_quarantined_bytes") == 0


async def test_a_registry_has_one_collector_for_all_communicators() -> None:
    """Two collectors of one kind are no valid exposition: each family is there once."""
    async with (
        kvwire.open(name="a") as a,
        kvwire.open(name="b") as b,
        kvwire.open(name="a") as also_a,
    ):
        registry = CollectorRegistry()
        collector = CommunicatorCollector(a)
        registry.register(collector)
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            registry.register(CommunicatorCollector(b))
        collector.add(b)
        with pytest.raises(kvwire.UsageError, match=r"communicators .* are called 'a'"):
            collector.add(also_a)
        assert sources_of(registry, "communicator") == {"a", "b"}
        collector.remove("a")
        assert sources_of(registry, "communicator") == {"b"}


async def test_a_scrape_shows_when_a_certificate_expires(tmp_path: Path) -> None:
    """Of the files as they are now, though nobody has connected since."""
    authority = Authority(tmp_path)
    config = authority.config(NEAR, days=(-10, 80))
    async with kvwire.open(name="one", **config) as comm, kvwire.open() as other:
        value = Scrape(CommunicatorCollector(comm), communicator="one")
        metric = "kvwire_certificate_{}_timestamp_seconds"

        def days(field: str) -> float:
            seconds = value(metric.format(field))
            assert seconds is not None
            return round((seconds - time.time()) / 86_400, 2)

        assert (days("not_before"), days("not_after")) == (-10, 80)
        new = authority.issue(NEAR, days=(-1, 300))
        new.key_file.replace(config["tls_key_file"])
        new.cert_file.replace(config["tls_cert_file"])
        assert days("not_after") == 300
        renewed = issue(tmp_path, "kvwire test CA", ca=True, days=(-1, 30))
        renewed.cert_file.replace(config["tls_ca_file"])
        newer = issue(tmp_path, NEAR, by=renewed, days=(-1, 300))
        newer.key_file.replace(config["tls_key_file"])
        newer.cert_file.replace(config["tls_cert_file"])
        assert days("not_after") == 30
        plain = Scrape(CommunicatorCollector(other), communicator=other.name)
        assert plain(metric.format("not_after")) is None


async def test_failed_transfers_and_lost_connections_are_counted() -> None:
    async with connected("inproc") as pair:
        inc = pair.left.pull("never", Memory().cache, [0])
        inc.abort("not wanted any more")
        assert not (await inc).complete
        pair.left.abort("gone")
        await pair.right.wait_closed()
        assert pair.near.counters.transfers_failed == 1
        assert pair.near.counters.connections_lost == 1


async def test_a_scrape_shows_a_store_its_tiers_and_its_tenants(tmp_path: Path) -> None:
    memory, disk = "memory:1MiB", f"disk:{tmp_path}?size=1MiB"
    hashes = [bytes([i]) * 32 for i in range(3)]
    tenants = ["t?quota=64KiB"]
    async with kvwire_store.BlockStore.open([memory, disk], tenants=tenants) as store:
        value = Scrape(StoreCollector(store, "cache"), store="cache")
        await store.put(hashes[:2], Memory().cache, [0, 1])
        await store.put(hashes[:2], Memory().cache, [0, 1])
        await store.get(hashes, Memory().cache, [0, 1, 2])
        assert value("kvwire_store_puts_total") == 2
        assert value("kvwire_store_stored_blocks_total") == 2
        assert value("kvwire_store_present_blocks_total") == 2
        assert value("kvwire_store_hit_blocks_total") == 2
        assert value("kvwire_store_missed_blocks_total") == 1
        assert value("kvwire_store_got_bytes_total") == 2 * SPEC.block_bytes
        assert value("kvwire_store_written_blocks_total", tier=disk) == 2
        assert value("kvwire_store_blocks", tier=memory) == 2
        assert value("kvwire_store_trouble", tier=disk) == 0
        await store.put([b"a", b"b"], Memory().cache, [0, 1], tenant="t")
        assert value("kvwire_store_tenant_stored_blocks_total", tenant="t") == 2
        where = {"tenant": "t", "tier": memory}
        assert value("kvwire_store_tenant_quota_bytes", **where) == 64 * 1024
        used = value("kvwire_store_tenant_used_bytes", **where)
        assert used == store.tenant_stats()["t"].tiers[memory].used_bytes > 0
        # A server's blocks are not counted here, which differs from 0.
        async with (
            kvwire_store.StoreServer(store, "127.0.0.1:0") as server,
            kvwire_store.BlockStore.open([f"kvwire://{server.address}"]) as client,
        ):
            (tier,) = (name for name in client.stats() if name.startswith("kvwire:"))
            value = Scrape(StoreCollector(client, "far"), store="far")
            assert value("kvwire_store_written_blocks_total", tier=tier) == 0
            assert value("kvwire_store_blocks", tier=tier) is None


# --- distributions of transfers: what is counted where, and how many peers are named


def test_buckets_count_what_is_at_most_their_bound() -> None:
    found = distributions.Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        found.add(value)
    assert found.buckets == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert found.total == 6.0


async def test_an_end_is_in_each_of_them_once() -> None:
    seen = distributions.TransferDistributions()
    async with connected("inproc") as pair:
        pair.near.watchers.add(seen)
        out = pair.far.publish("x", Memory().cache, [0, 1])
        out.ready()
        out.finish()
        outcome = await pair.left.pull("x", Memory().cache, [2, 3])
        await out
    for found in (seen.exposed, seen.queue, seen.nbytes):
        assert sum(found.counts) == 1
    assert seen.nbytes.total == outcome.nbytes
    times = outcome.timings
    assert seen.exposed.total + seen.queue.total + times.mark_wait_s == pytest.approx(
        times.total_s
    )
    assert seen.peers == {("far", "consumer", "complete"): (1, outcome.nbytes)}


async def test_peers_are_bounded() -> None:
    seen = distributions.TransferDistributions()
    async with connected("inproc") as pair:
        inc = pair.left.pull("x", Memory().cache, [2, 3])
        inc.abort()
        outcome = await inc

        class Named:
            def __init__(self, name: str) -> None:
                self.peer = replace(pair.left.peer, name=name)

        for number in range(distributions.PEERS_MAX + 3):
            one: Any = Named(f"peer-{number}")
            seen.ended(inc, outcome, (one, one))
    assert len(seen.peers) == distributions.PEERS_MAX + 1
    assert seen.peers[distributions.OTHER, "consumer", "failed"] == (6, 0)
