"""``kvwire top`` and ``kvwire trace``: a read-only look into live processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter
from cyclopts.types import PositiveFloat
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvwire import KVWireError, Snapshot
from kvwire.cli.console import console, show
from kvwire.errors import printable
from kvwire.observe.inspect import snapshots, sockets, traces
from kvwire.observe.trace import document
from kvwire.types import in_bytes

# How often an idle link sends a PING.
_PING_S: Final = 2.0
_NOBODY: Final = "no process answers: are they started with KVWIRE_INSPECT?"


def top(
    folder: Path | None = None,
    /,
    *,
    once: bool = False,
    json: bool = False,
    interval_s: Annotated[PositiveFloat, Parameter(name="--interval")] = 1.0,
) -> None:
    """Show the open connections and transfers of live processes, and why they wait.

    Only processes started with KVWIRE_INSPECT or the key ``inspect`` are shown.

    Args:
        folder: The folder of their sockets, or one socket; KVWIRE_INSPECT without it.
        once: Print one snapshot and exit, instead of updating until Ctrl-C.
        json: Print snapshots as JSON, one line for each process.
        interval_s: Seconds between two updates.
    """
    paths = sockets(folder)
    found, silent = snapshots(paths)
    if json:
        for one in found:
            sys.stdout.buffer.write(msgspec.json.encode(one) + b"\n")
        sys.stdout.flush()
        return
    if once:
        show(screen(found, (), silent), console())
        return
    with Live(screen(found, (), silent), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            before = found
            found, silent = snapshots(sockets(folder))
            live.update(screen(found, before, silent), refresh=True)


def trace(folder: Path | None = None, /, *, to: Path = Path("trace.json")) -> None:
    """Write the last events of live processes as a file for ui.perfetto.dev.

    Args:
        folder: The folder of their sockets, or one socket; KVWIRE_INSPECT without it.
        to: The file.

    Raises:
        KVWireError: No process answers.
    """
    found, silent = traces(sockets(folder))
    for said in silent:
        print(said, file=sys.stderr)
    if not found:
        raise KVWireError(_NOBODY)
    to.write_bytes(msgspec.json.encode(document(found)))
    events = sum(len(one.events) for one in found)
    print(
        f"{to}: {events} events of {len(found)} processes; open it in ui.perfetto.dev"
    )


def screen(
    found: Sequence[Snapshot], before: Sequence[Snapshot], silent: Sequence[str]
) -> RenderableType:
    """Return the view of ``kvwire top``: a table for each kind of open object."""
    parts: list[RenderableType] = [_processes(found, before)]
    tables = (_connections(found), _transfers(found), _stores(found))
    parts += [part for table in tables if table.row_count for part in (Text(), table)]
    asked = [f"{s.name}: asked for {a!r}, unnamed" for s in found for a in s.asked]
    nobody = () if found else (_NOBODY,)
    parts += [_plain(said) for said in (*asked, *silent, *nobody)]
    return Group(*parts)


def _processes(found: Sequence[Snapshot], before: Sequence[Snapshot]) -> Table:
    table = _table("process", "pid", "conns", "open", "done", "failed", "in/s", "out/s")
    earlier = {one.incarnation: one for one in before}
    for one in found:
        rates = ["-", "-"]
        old = earlier.get(one.incarnation)
        if old is not None and one.at_s > old.at_s:
            spent_s = one.at_s - old.at_s
            rates = [
                in_bytes(int((one.counters[key] - old.counters[key]) / spent_s))
                for key in ("received_bytes", "sent_bytes")
            ]
        failed = one.counters["transfers_partial"] + one.counters["transfers_failed"]
        table.add_row(
            _plain(one.name),
            str(one.pid),
            str(one.open_connections),
            str(one.open_transfers),
            str(one.counters["transfers_complete"]),
            str(failed),
            *rates,
        )
    return table


def _connections(found: Sequence[Snapshot]) -> Table:
    table = _table("process", "peer", "over", "age", "silent", "queued", "unreceived")
    for one in found:
        for row in one.connections:
            style = "bold red" if row.silent_s > 2 * _PING_S else ""
            table.add_row(
                _plain(one.name),
                _plain(row.peer),
                row.transport,
                f"{row.age_s:.0f} s",
                Text(f"{row.silent_s:.1f} s", style=style),
                in_bytes(row.queued_bytes),
                str(row.unreceived),
            )
    return table


def _transfers(found: Sequence[Snapshot]) -> Table:
    table = _table("process", "transfer", "layers", "bytes", "age", "waits for")
    for one in found:
        for row in one.transfers:
            way = "to" if row.side == "outgoing" else "from"
            peers = ", ".join(row.peers)
            table.add_row(
                _plain(one.name),
                _plain(f"{row.id} {way} {peers}" if peers else row.id),
                f"{row.layers_landed}/{row.layers_marked}/{row.layers}",
                f"{in_bytes(row.landed_bytes)}/{in_bytes(row.nbytes)}",
                f"{row.age_s:.1f} s",
                _plain(row.waits_for),
            )
    return table


def _stores(found: Sequence[Snapshot]) -> Table:
    table = _table("process", "store", "calls", "pinned", "hits", "misses", "trouble")
    for one in found:
        for row in one.stores:
            calls = ", ".join(f"{c.verb} {c.age_s:.1f} s" for c in row.calls[:3])
            table.add_row(
                _plain(one.name),
                _plain(row.name),
                calls or "-",
                str(row.pinned_blocks),
                str(row.counters["hit_blocks"]),
                str(row.counters["missed_blocks"]),
                _plain("; ".join(row.trouble.values())),
            )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _plain(text: str) -> Text:
    """Return text from a process, without characters that control a terminal."""
    return Text(printable(text))
