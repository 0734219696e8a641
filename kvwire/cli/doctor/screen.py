"""The doctor's output: a screen of 80 columns and 40 rows, and the report of a trial.

What is in order is said in as few words as the screen needs; what is not keeps its
reason and its remedy, whatever room they take. A peer's words are shown only where they
cannot do anything to a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    """Show one host; in brief, what is in order has only its name."""
    machine = examination.machine
    versions = "  ".join(f"{k} {v}" for k, v in machine.versions.items())
    container = f"  in a {machine.container} container" if machine.container else ""
    pid = examination.process.pid
    transports, facts, asked = _Rows(brief), _Rows(brief), _Rows(brief)
    for transport in examination.transports:
        transports.add_transport(transport)
    facts.add_findings(examination.findings)
    asked.add_findings(examination.asked)
    return Group(
        _line(versions),
        _line(f"{machine.system}, {machine.cpus} CPUs{container}"),
        Text("transports", style="bold"),
        transports.table,
        Text(f"machine and process {pid}" if pid else "machine", style="bold"),
        facts.table,
        Text("config", style="bold"),
        asked.table,
        _verdict(examination),
    )


def negotiated(trial: Trial) -> RenderableType:
    """Show one trial: the choice, and what was measured."""
    table = _table()
    for candidate in trial.candidates:
        if trial.asked not in ("", candidate.name):
            continue  # ruled out by what was asked
        mark = Text("taken", style="green") if candidate.taken else Text("refused")
        table.add_row(mark, *map(_line, (candidate.name, candidate.reason)))
    title = f"require {trial.asked}" if trial.asked else "what both sides choose"
    return Group(_line(title, "bold"), table, *_measured(trial))


def written(report: PeerReport) -> RenderableType:
    """Show a report in full, for a file or a mail."""
    hosts: list[RenderableType] = [Text("the side that connected", style="bold")]
    hosts.append(host(report.here))
    if report.there is not None:
        title = f"the side that listened, {report.address}"
        hosts += [Text(), _line(title, "bold"), host(report.there)]
    trials = [part for trial in report.trials for part in (Text(), negotiated(trial))]
    said = (
        "in order"
        if report.well
        else "NOT in order: see what is damaged or stopped above"
    )
    return Group(*hosts, *trials, Text(), Text(said, style="bold"))


class _Rows:
    """Makes a table of findings: state, name, text; the remedy has its own row."""

    def __init__(self, brief: bool) -> None:
        self.table = _table()
        self._brief = brief

    def add_transport(self, transport: Transport) -> None:
        state = "ok" if transport.available else "missing"
        self._add(state, transport.name, transport.reason, transport.remedy)
        for finding in transport.findings:
            if finding.text == transport.reason:
                continue  # that has been said
            if finding.state != "ok" or not self._brief:
                # Below the transport it belongs to.
                text = f"{finding.name}: {finding.text}"
                said = finding.remedy == transport.remedy
                self._add(finding.state, "", text, "" if said else finding.remedy)

    def add_findings(self, found: Sequence[Finding]) -> None:
        for finding in found:
            if finding.state != "ok" or not self._brief:
                self._add(finding.state, finding.name, finding.text, finding.remedy)
        well = ", ".join(finding.name for finding in found if finding.state == "ok")
        if self._brief and well:
            self._add("ok", "", well)

    def _add(self, state: str, name: str, text: str, remedy: str = "") -> None:
        mark = Text(state, style=_MARK_STYLES[state])
        self.table.add_row(mark, _line(name), _line(text))
        if remedy:
            self.table.add_row("", "", _line(f"-> {remedy}"))


def _table() -> Table:
    # With a ratio, only the last column gives way where a row is too long.
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(width=_MARK_COLUMNS)
    table.add_column(width=_NAME_COLUMNS)
    table.add_column(ratio=1, overflow="fold")
    return table


def _verdict(examination: Examination) -> Text:
    missing = list(examination.missing())
    if not missing:
        return Text("everything that the configuration asks for is here", "green")
    names = ", ".join(finding.name for finding in missing)
    return _line(f"missing, and the configuration asks for it: {names}", "bold red")


def _measured(trial: Trial) -> Iterator[RenderableType]:
    if trial.round_trip_s is not None:
        yield _line(f"64 B there and back: {trial.round_trip_s * 1e6:.0f} us (median)")
    if trial.rates:
        yield _rates(trial.rates)
    for what in trial.damaged:
        yield _line(f"damaged: {what}", "bold red")
    if trial.rates and not trial.damaged:
        yield _line("every byte compared: in order", "green")
    if trial.error:
        yield _line(f"stopped: {trial.error}", "yellow")


def _rates(rates: Sequence[Rate]) -> Table:
    """Make a row for each size, a column for each direction."""
    table = Table.grid(padding=(0, 3))
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_row("fragments of", "put, to the peer", "get, from the peer")
    for size in dict.fromkeys(rate.fragment_bytes for rate in rates):
        found = {r.verb: r for r in rates if r.fragment_bytes == size}
        table.add_row(in_bytes(size), *(_speed(found.get(v)) for v in ("put", "get")))
    return table


def _speed(rate: Rate | None) -> str:
    return "" if rate is None else f"{rate.bytes_per_s / 1e9:.3f} GB/s"


def _line(text: str, style: str = "") -> Text:
    """Text that may be a peer's: nothing in it steers a terminal."""
    return Text("".join(_printable(text)), style)


def _printable(text: str) -> Iterable[str]:
    return (letter if letter.isprintable() else "?" for letter in text)
