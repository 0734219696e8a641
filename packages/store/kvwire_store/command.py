"""``kvwire store``: serve a store to other processes, and inspect one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from cyclopts import App, Parameter
from rich.console import Console

from kvwire import Config, UsageError
from kvwire.directory import Selector
from kvwire.errors import printable, without_password
from kvwire.types import in_bytes, read_bytes
from kvwire_store.limits import STORE_BERTH_BYTES
from kvwire_store.server.client import ask_report, delete_all
from kvwire_store.server.messages import StatsReport, TierRow
from kvwire_store.server.server import StoreServer
from kvwire_store.store import BlockStore

app: App = App(
    name="store",
    help="Serve a KV store to other processes, or inspect and manage one.",
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AnnounceOptions:
    """Options that announce a server to its clients.

    Attributes:
        directory: Announce the server in this directory, such as redis://host:6379,
            with the role "store"; clients then use kvwire://role=store?directory=URL.
        label: A label that selectors can match: --label pool=a; may be repeated. Set
            the label `node` if the node's address can change.
        advertise: The host, or HOST:PORT, that clients connect to.
    """

    directory: str = ""
    label: list[str] = field(default_factory=list)
    advertise: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """The options as arguments of a StoreServer."""
        if not self.directory:
            if self.label or self.advertise:
                raise UsageError("--label and --advertise need --directory")
            return {}
        return {
            "directory": self.directory,
            "advertise": self.advertise or None,
            # A selector has the same syntax.
            "labels": dict(Selector.parse(",".join(self.label)).terms),
        }


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Options that decide which processes are trusted.

    Attributes:
        psk_file: The key file, which every client needs too; `kvwire keygen` makes one.
        config: A kvwire.toml; KVWIRE_* environment variables also apply.
        read_only: Clients may get blocks but not put any.
        tenant: A tenant's name, quotas and key; repeat the option for more: --tenant
            'acme?disk=100GiB&memory=1GiB&ttl=3600&key=/etc/acme.key'. A client with the
            key of --psk-file is the operator.
    """

    psk_file: Path | None = None
    config: Path | None = None
    read_only: bool = False
    tenant: list[str] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        """The options as arguments of a StoreServer."""
        settings: dict[str, Any] = {"config": self.config, "read_only": self.read_only}
        if self.psk_file is not None:
            settings["psk_file"] = str(self.psk_file)
        return settings


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Options of a client of a store server.

    Attributes:
        psk_file: The key that the server requires.
        config: A kvwire.toml; KVWIRE_* environment variables also apply.
    """

    psk_file: Path | None = None
    config: Path | None = None

    @property
    def settings(self) -> Config:
        """The configuration of the client."""
        key: dict[str, Any] = {}
        if self.psk_file is not None:
            key = {"trust": "psk", "psk_file": str(self.psk_file)}
        return Config.load(self.config, **key)


_ACCESS: Final = AccessOptions()
_CLIENT: Final = ClientOptions()
_ANNOUNCEMENT: Final = AnnounceOptions()


@app.command
def serve(
    *,
    listen: str,
    tier: list[str],
    access: AccessOptions = _ACCESS,
    berth: str = in_bytes(STORE_BERTH_BYTES),
    write: Literal["through", "back"] = "through",
    metrics: str = "",
    announcement: AnnounceOptions = _ANNOUNCEMENT,
) -> None:
    """Serve a store to other processes, which open it as the tier kvwire://HOST:PORT.

    The server runs until Ctrl-C or SIGTERM; then it finishes running operations and
    closes the tiers.

    Args:
        listen: The address to listen on, such as 0.0.0.0:7500. Any address but loopback
            needs a key.
        tier: A tier; repeat the option, fastest tier first: --tier memory:8GiB --tier
            'disk:/var/kv?size=100GiB'.
        access: The trusted processes.
        berth: The size of a staging buffer, which is also the largest block that a
            client can put.
        write: When a put is complete: "through": once a disk has it; "back": once
            memory has it.
        metrics: Serve HTTP on this address, such as 127.0.0.1:9400: /metrics
            (Prometheus) and /health. Needs the extra `metrics`.
        announcement: The directory in which clients find it.
    """
    settings = access.settings | announcement.settings
    settings["berth_bytes"] = _berth_bytes(berth)
    opening = BlockStore.open(tier, write=write, tenants=access.tenant)
    asyncio.run(_serve(listen, tier, opening, metrics, settings))


@app.command
def stats(
    address: str,
    /,
    *,
    client: ClientOptions = _CLIENT,
    json: bool = False,
) -> None:
    """Show the tiers of a served store, and its clients.

    Args:
        address: The server's address.
        client: The key that the server requires.
        json: Print JSON instead.
    """
    where = address.removeprefix("kvwire://")
    report = asyncio.run(ask_report(where, client.settings))
    if json:
        document = msgspec.json.encode(_plain(report))
        sys.stdout.buffer.write(msgspec.json.format(document) + b"\n")
        return
    show_report(report)


@app.command
def delete(
    address: str,
    /,
    *,
    tenant: str = "",
    every: Annotated[bool, Parameter(name="--all")] = False,
    client: ClientOptions = _CLIENT,
) -> None:
    """Delete all blocks of a tenant from a store server, and print their number.

    Without --tenant and --all, the command asks for confirmation on the terminal;
    without a terminal, it fails.

    Args:
        address: The server's address.
        tenant: The tenant's name; needs the operator's key.
        every: Delete all blocks of the tenant whose key is given. With the operator's
            key, or without keys, delete all blocks without a tenant.
        client: The key that the server requires.
    """
    if not (tenant or every or _agreed(f"delete all blocks at {address}?")):
        raise UsageError("nothing is deleted: pass --all, or --tenant NAME")
    where = address.removeprefix("kvwire://")
    deleted = asyncio.run(delete_all(where, client.settings, tenant))
    print(f"deleted {deleted:,} block{'' if deleted == 1 else 's'}")


def _agreed(question: str) -> bool:
    """Ask for confirmation on the terminal; return False without a terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        return False
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _berth_bytes(text: str) -> int:
    try:
        return read_bytes(text)
    except UsageError as exc:
        raise UsageError(f"--berth {exc}") from None


async def _serve(
    listen: str,
    tiers: list[str],
    opening: AbstractAsyncContextManager[BlockStore],
    metrics: str,
    settings: dict[str, Any],
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with (
        opening as store,
        StoreServer(store, listen, **settings) as server,
    ):
        # Not wrapped: scripts read the port from it.
        console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        also = ""
        with contextlib.ExitStack() as stack:
            if metrics:
                from kvwire_store.metrics_server import MetricsServer  # noqa: PLC0415 - an extra

                monitored = stack.enter_context(
                    MetricsServer(store, metrics, server.communicator)
                )
                also = f"; metrics at {monitored.url}"
            shown = map(without_password, tiers)
            served = f"{', '.join(shown)} on {server.address}"
            console.print(f"serving {served}{also}; Ctrl-C ends")
            await stop.wait()


def show_report(report: StatsReport) -> None:
    """Print tiers, tenants and clients, with each name on a line above its row."""
    # Not wrapped: a name may be longer than a screen is wide.
    console = Console(highlight=False, markup=False, soft_wrap=True)

    def table(head: str, rows: Sequence[tuple[str, ...]]) -> None:
        columns = zip(head.split(), *(cells for _, *cells in rows), strict=True)
        widths = [max(map(len, column)) for column in columns]
        for name, *cells in (("", *head.split()), *rows) if rows else ():
            if name:
                console.print(name)
            padded = map(str.rjust, cells, widths)
            console.print("  " + "  ".join(padded))

    console.print(report.name + (", read-only" if report.read_only else ""))
    table("blocks used of read written evicted failed", list(map(_cells, report.tiers)))
    uses = [
        (
            f"{tenant.name or 'no tenant'} in {tier}",
            in_bytes(use.used_bytes),
            in_bytes(use.quota_bytes) if use.quota_bytes else "-",
            in_bytes(use.pinned_bytes),
            f"{use.evicted_blocks:,}",
            f"{tenant.counters.hit_blocks:,}",
            f"{tenant.counters.missed_blocks:,}",
        )
        for tenant in report.tenants
        for tier, use in tenant.tiers
    ]
    table("used of pinned evicted hits misses", uses)
    for tier in report.tiers:
        if tier.error:
            console.print(printable(f"{tier.name}: {tier.error}"))
    dropped = f", {report.dropped} dropped" if report.dropped else ""
    console.print(f"\nclients: {len(report.clients)}{dropped}")
    clients = [
        (
            f"{client.name} at {client.address}",
            f"{client.requests:,}",
            f"{client.asked:,}",
            in_bytes(client.read_bytes),
            in_bytes(client.written_bytes),
        )
        for client in report.clients
    ]
    table("open requests read written", clients)


def _cells(tier: TierRow) -> tuple[str, ...]:
    counts = tier.stats
    return (
        tier.name,
        "not counted" if counts.blocks is None else f"{counts.blocks:,}",
        "-" if counts.used_bytes is None else in_bytes(counts.used_bytes),
        in_bytes(counts.size_bytes) if counts.size_bytes else "-",
        f"{counts.read_blocks:,}",
        f"{counts.written_blocks:,}",
        f"{counts.evicted_blocks:,}",
        f"{counts.damaged_blocks + counts.failed_blocks:,}",
    )


def _plain(report: StatsReport) -> dict[str, Any]:
    """Return the report with names for its fields, which are numbers on the wire."""
    return _named(report) | {
        "tiers": [_tier(row) for row in report.tiers],
        "clients": [_named(row) for row in report.clients],
        "tenants": [
            _named(row) | {"tiers": {name: _named(use) for name, use in row.tiers}}
            for row in report.tenants
        ],
    }


def _tier(row: TierRow) -> dict[str, Any]:
    named = _named(row)
    return named | _named(named.pop("stats"))


def _named(message: msgspec.Struct) -> dict[str, Any]:
    fields = msgspec.structs.asdict(message)
    fields.pop("number", None)
    return fields
