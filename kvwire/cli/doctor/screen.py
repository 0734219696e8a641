"""The doctor's output: a screen of 80 columns and 40 rows, and the report of a trial.

Good findings are shortened until the screen fits. Each warning keeps its reason and its
remedy, however long they are. Control characters for the terminal are removed from a
peer's text.
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
from kvwire.cli.doctor.peer import PeerReport, Rate, Trial
from kvwire.types import in_bytes

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


def negotiated(trial: Trial) -> RenderableType:
    """Return the view of one trial: the choice of transport, and the measurements."""
    table = _table()
    for candidate in trial.candidates:
        if trial.asked not in ("", candidate.name):
            continue  # ruled out by the requirement
        mark = Text("taken", style="green") if candidate.taken else Text("refused")
        table.add_row(mark, *map(_line, (candidate.name, candidate.reason)))
    title = f"require {trial.asked}" if trial.asked else "what both sides choose"
    return Group(_line(title, "bold"), table, *_measured(trial))


def written(report: PeerReport) -> RenderableType:
    """Return a report in full, for a file or a mail."""
    hosts: list[RenderableType] = [Text("the side that connected", style="bold")]
    hosts.append(host(report.here))
    if report.there is not None:
        title = f"the side that listened, {report.address}"
        hosts += [Text(), _line(title, "bold"), host(report.there)]
    trials = [part for trial in report.trials for part in (Text(), negotiated(trial))]
    verdict = (
        "in order"
        if report.well
        else "NOT in order: see the damaged or stopped parts above"
    )
    return Group(*hosts, *trials, Text(), Text(verdict, style="bold"))


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


def _measured(trial: Trial) -> Iterator[RenderableType]:
    if trial.round_trip_s is not None:
        yield _line(f"round trip of 64 B: {trial.round_trip_s * 1e6:.0f} us (median)")
    if trial.rates:
        yield _rates(trial.rates)
    for what in trial.damaged:
        yield _line(f"damaged: {what}", "bold red")
    if trial.rates and not trial.damaged:
        yield _line("every byte compared: all equal", "green")
    if trial.error:
        yield _line(f"stopped: {trial.error}", "yellow")


def _rates(rates: Sequence[Rate]) -> Table:
    """Return a table with a row for each size, and a column for each direction."""
    table = Table.grid(padding=(0, 3))
    for name in ("fragments of", "put, to the peer", "get, from the peer"):
        table.add_column(name, justify="right")
    table.show_header = True
    for size in dict.fromkeys(rate.fragment_bytes for rate in rates):
        found = {
            r.verb: f"{r.bytes_per_s / 1e9:.3f} GB/s"
            for r in rates
            if r.fragment_bytes == size
        }
        table.add_row(in_bytes(size), found.get("put"), found.get("get"))
    return table


def _line(text: str, style: str = "") -> Text:
    """Return text, perhaps a peer's, with all terminal control removed."""
    return Text("".join(c if c.isprintable() else "?" for c in text), style)
