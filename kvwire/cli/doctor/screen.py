"""The doctor's output: a screen of 80 columns and 40 rows.

Good findings are shortened until the screen fits. Each warning keeps its reason and its
remedy, however long they are. Control characters for the terminal are removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvwire.backend import Finding
from kvwire.cli.doctor.examination import Examination, Transport

ROWS_MAX: Final = 40
COLUMNS_MAX: Final = 80
_MARK_STYLES: Final = {"ok": "green", "warn": "yellow", "missing": "bold red"}
_MARK_COLUMNS: Final = 7
_NAME_COLUMNS: Final = 15


def fitting(examination: Examination, console: Console) -> RenderableType:
    """Show one host in full if that fits ``ROWS_MAX`` rows, or else in brief."""
    shown = host(examination)
    if len(console.render_lines(shown, pad=False)) <= ROWS_MAX:
        return shown
    return host(examination, brief=True)


def host(examination: Examination, *, brief: bool = False) -> RenderableType:
    """Return the view of one host; in brief, good findings have only their name."""
    versions = "  ".join(f"{k} {v}" for k, v in examination.versions.items())
    container = examination.container
    pid = examination.pid
    inside = f"  in a {container} container" if container else ""
    shown = _in_brief if brief else iter
    transports = (
        finding for one in examination.transports for finding in _of(one, brief)
    )
    return Group(
        _line(versions),
        _line(f"{examination.system}, {examination.cpus} CPUs{inside}"),
        Text("transports", style="bold"),
        _findings(transports),
        Text(f"machine and process {pid}" if pid else "machine", style="bold"),
        _findings(shown(examination.findings)),
        Text("config", style="bold"),
        _findings(shown(examination.asked)),
        _verdict(examination),
    )


def _of(transport: Transport, brief: bool) -> Iterator[Finding]:
    """Yield a row for a transport, and the findings that its reason leaves out."""
    yield Finding(
        name=transport.name,
        state="ok" if transport.available else "missing",
        text=transport.reason,
        remedy=transport.remedy,
    )
    for finding in transport.findings:
        if finding.text != transport.reason and not (brief and finding.state == "ok"):
            remedy = "" if finding.remedy == transport.remedy else finding.remedy
            text = f"{finding.name}: {finding.text}"
            yield replace(finding, name="", text=text, remedy=remedy)


def _in_brief(found: Sequence[Finding]) -> Iterator[Finding]:
    """Yield each warning with its remedy, and only the names of good findings."""
    yield from (finding for finding in found if finding.state != "ok")
    if well := ", ".join(finding.name for finding in found if finding.state == "ok"):
        yield Finding(name="", state="ok", text=well)


def _findings(found: Iterable[Finding]) -> Table:
    """Make a table: state, name, text; the remedy has its own row."""
    table = _table()
    for finding in found:
        mark = Text(finding.state, style=_MARK_STYLES[finding.state])
        table.add_row(mark, _line(finding.name), _line(finding.text))
        if finding.remedy:
            table.add_row("", "", _line(f"-> {finding.remedy}"))
    return table


def _table() -> Table:
    # With a ratio, only the last column shrinks if a row is too long.
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(width=_MARK_COLUMNS)
    table.add_column(width=_NAME_COLUMNS)
    table.add_column(ratio=1, overflow="fold")
    return table


def _verdict(examination: Examination) -> Text:
    missing = list(examination.missing())
    if not missing:
        return Text("everything that the configuration requires is here", "green")
    names = ", ".join(finding.name for finding in missing)
    return _line(f"missing, but required by the configuration: {names}", "bold red")


def _line(text: str, style: str = "") -> Text:
    """Return text with all terminal control removed."""
    return Text("".join(c if c.isprintable() else "?" for c in text), style)
