"""``kvwire top`` and ``kvwire trace``: a read-only look into live processes."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.types import PositiveFloat
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvwire import KVWireError
from kvwire.cli.console import console, show
from kvwire.observe.inspect import snapshots, sockets, traces
from kvwire.observe.inspect_page import InspectPage
from kvwire.observe.listening import HttpThread
from kvwire.observe.page import PAGE
from kvwire.observe.trace import document
from kvwire.observe.view import (
    NOBODY,
    Cell,
    RateMemory,
    TopTable,
    TopView,
    process_view,
    text_of,
)


def top(
    folder: Path | None = None,
    /,
    *,
    once: bool = False,
    json: bool = False,
    interval_s: Annotated[PositiveFloat, Parameter(name="--interval")] = 1.0,
    serve: str = "",
) -> None:
    """Show the open connections and transfers of live processes, and why they wait.

    Only processes started with KVWIRE_INSPECT or the key ``inspect`` are shown.

    Args:
        folder: The folder of their sockets, or one socket; KVWIRE_INSPECT by default.
        once: Print one snapshot and exit, instead of updating until Ctrl-C.
        json: Print snapshots as JSON, one line for each process.
        interval_s: Seconds between two updates.
        serve: Serve the view as a web page on this address of this host, such as
            127.0.0.1:9401, and print the link, which contains the page's key.
    """
    paths = sockets(folder)
    if serve:
        _serve(folder, serve)
        return
    found, silent = snapshots(paths)
    if json:
        for one in found:
            sys.stdout.buffer.write(msgspec.json.encode(one) + b"\n")
        sys.stdout.flush()
        return
    if once:
        show(screen(process_view(found, (), silent)), console())
        return
    rates = RateMemory(most_s=10 * interval_s)
    drawn = screen(process_view(found, rates.before(found), silent))
    with Live(drawn, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            found, silent = snapshots(sockets(folder))
            view = process_view(found, rates.before(found), silent)
            live.update(screen(view), refresh=True)


def _serve(folder: Path | None, address: str) -> None:
    answers = InspectPage(folder)
    with HttpThread(answers.checked(address), answers.get) as server:
        # The part after # stays in the browser, and so out of logs.
        print(f"{server.url}{PAGE}#{answers.key}", flush=True)
        print("anyone with this link can read it; Ctrl-C ends", file=sys.stderr)
        threading.Event().wait()


def trace(folder: Path | None = None, /, *, to: Path = Path("trace.json")) -> None:
    """Write the last events of live processes as a file for ui.perfetto.dev.

    Args:
        folder: The folder of their sockets, or one socket; KVWIRE_INSPECT by default.
        to: The file.

    Raises:
        KVWireError: No process answers.
    """
    found, silent = traces(sockets(folder))
    for text in silent:
        print(text, file=sys.stderr)
    if not found:
        raise KVWireError(NOBODY)
    to.write_bytes(msgspec.json.encode(document(found)))
    events = sum(len(one.events) for one in found)
    print(
        f"{to}: {events} events of {len(found)} processes; open it in ui.perfetto.dev"
    )


def screen(view: TopView) -> RenderableType:
    """Return the view of ``kvwire top``: a table for each kind of open object."""
    parts: list[RenderableType] = []
    for table in view.tables:
        if table.rows:
            parts += [_drawn(table), Text()]
    return Group(*parts, *map(Text, view.notes))


def _drawn(table: TopTable) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        drawn.add_column(column.name, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(_text, row.cells))
    return drawn


def _text(cell: Cell) -> Text:
    alarm = not isinstance(cell, str) and cell.alarm
    return Text(text_of(cell), style="bold red" if alarm else "")
