"""The tables of ``kvwire store stats``: a server's tiers, tenants and clients."""

from __future__ import annotations

from kvwire.errors import printable
from kvwire.observe.view import Column, Marked, Row, TopTable, share_of
from kvwire.types import in_bytes
from kvwire_store.server.messages import StatsReport


def report_tables(report: StatsReport) -> tuple[TopTable, ...]:
    """Return the tables of a store server's report: tiers, tenants, clients."""
    return (_tiers(report), _tenants(report), _clients(report))


def report_notes(report: StatsReport) -> tuple[str, ...]:
    """Return sentences about a store server that no table shows."""
    errors = [f"{tier.name}: {tier.error}" for tier in report.tiers if tier.error]
    return tuple(map(printable, errors))


def _tiers(report: StatsReport) -> TopTable:
    rows: list[Row] = []
    for tier in report.tiers:
        counts = tier.stats
        size = counts.size_bytes
        broken = counts.damaged_blocks + counts.failed_blocks
        row = Row.of(
            tier.name,
            Marked(tier.name, alarm=bool(tier.error)),
            f"{counts.blocks:,}",
            Marked(
                in_bytes(counts.used_bytes),
                share=share_of(counts.used_bytes, size),
            ),
            in_bytes(size) if size else "-",
            f"{counts.read_blocks:,}",
            f"{counts.written_blocks:,}",
            f"{counts.evicted_blocks:,}",
            f"{broken:,}",
        )
        rows.append(row)
    return TopTable(
        "tiers",
        "Tiers of the store, the fastest first",
        (
            Column("tier"),
            Column("blocks", number=True),
            Column("used", number=True),
            Column("of", "the bytes that it may use", number=True),
            Column("read", "blocks got from it", number=True),
            Column("written", "blocks put into it", number=True),
            Column("evicted", "blocks that made room for others", number=True),
            Column("failed", "blocks damaged, not read or not written", number=True),
        ),
        tuple(rows),
    )


def _tenants(report: StatsReport) -> TopTable:
    rows: list[Row] = []
    for tenant in report.tenants:
        for tier, use in tenant.tiers:
            quota = use.quota_bytes
            share = share_of(use.used_bytes, quota)
            row = Row.of(
                f"{tenant.name} {tier}",
                f"{tenant.name or 'no tenant'} in {tier}",
                Marked(in_bytes(use.used_bytes), share=share),
                in_bytes(quota) if quota else "-",
                in_bytes(use.pinned_bytes),
                f"{use.evicted_blocks:,}",
                f"{tenant.counters.hit_blocks:,}",
                f"{tenant.counters.missed_blocks:,}",
            )
            rows.append(row)
    return TopTable(
        "tenants",
        "Tenants",
        (
            Column("tenant"),
            Column("used", number=True),
            Column("of", "its quota", number=True),
            Column("pinned", "bytes that may not be evicted", number=True),
            Column("evicted", "its blocks that made room for others", number=True),
            Column("hits", "blocks that its gets have found", number=True),
            Column("misses", "blocks that its gets have not found", number=True),
        ),
        tuple(rows),
    )


def _clients(report: StatsReport) -> TopTable:
    rows: list[Row] = []
    for client in report.clients:
        where = f"{client.name} at {client.address}"
        row = Row.of(
            where,
            where,
            f"{client.requests:,}",
            f"{client.asked:,}",
            in_bytes(client.read_bytes),
            in_bytes(client.written_bytes),
        )
        rows.append(row)
    return TopTable(
        "clients",
        "Clients of the store",
        (
            Column("client"),
            Column("open", "running requests", number=True),
            Column("requests", "requests since it connected", number=True),
            Column("read", number=True),
            Column("written", number=True),
        ),
        tuple(rows),
    )
