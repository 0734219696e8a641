"""The doctor's output: a screen of 80 columns and 40 rows, and the report of a trial.

What is in order is said in as few words as the screen needs; what is not keeps its
reason and its remedy. A peer's words are shown only where they cannot do anything to a
terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvwire.backend import Finding
from kvwire.cli.doctor.examination import Examination
from kvwire.cli.doctor.findings import in_bytes
from kvwire.cli.doctor.transports import Transport
from kvwire.cli.doctor.trial import Rate, Report, Trial

ROWS_MAX: Final = 40
COLUMNS_MAX: Final = 80
_MARK_STYLES: Final = {"ok": "green", "warn": "yellow", "missing": "bold red"}
_MARK_COLUMNS: Final = 7
_NAME_COLUMNS: Final = 15


def fitting(examination: Examination, console: Console) -> RenderableType:
    """One host, in the fullest way that fits ``ROWS_MAX`` rows of this console."""
    full = host(examination)
    if _rows(full, console) <= ROWS_MAX:
        return full
    brief = host(examination, brief=True)
    if _rows(brief, console) <= ROWS_MAX:
        return brief
    return host(examination, brief=True, cut=True)


def host(
    examination: Examination, *, brief: bool = False, cut: bool = False
) -> RenderableType:
    """One host.

    Args:
        examination: What was found.
        brief: Only the names of what is in order.
        cut: Cut each text at the end of its row.
    """
    machine = examination.machine
    versions = "  ".join(f"{k} {v}" for k, v in machine.versions.items())
    container = f"  in a {machine.container} container" if machine.container else ""
    pid = examination.process.pid
    table = _table(cut)
    for transport in examination.transports:
        _add_transport(table, transport, brief)
    for title, found in (
        (f"process {pid}" if pid else "machine", examination.findings),
        ("config", examination.asked),
    ):
        table.add_row(Text(title, style="bold"))
        _add_findings(table, found, brief)
    return Group(
        _line(versions),
        _line(f"{machine.system}, {machine.cpus} CPUs{container}"),
        Text("transports", style="bold"),
        table,
        _verdict(examination),
    )


def negotiated(trial: Trial) -> RenderableType:
    """One trial: the choice, and what was measured."""
    table = _table(cut=False)
    for candidate in trial.candidates:
        mark = Text("taken", style="green") if candidate.taken else Text("refused")
        table.add_row(mark, *map(_line, (candidate.name, candidate.reason)))
    title = f"require {trial.asked}" if trial.asked else "what both sides choose"
    return Group(Text(title, style="bold"), table, *_measured(trial))


def with_peer(report: Report) -> RenderableType:
    """This host in brief, and what was found with a peer."""
    title = Text(f"peer {report.address}", style="bold")
    trials = map(negotiated, report.trials)
    return Group(host(report.here, brief=True), Text(), title, *trials)


def written(report: Report) -> RenderableType:
    """A report in full, for a file or a mail."""
    hosts: list[RenderableType] = [Text("the side that connected", style="bold")]
    hosts.append(host(report.here))
    if report.there is not None:
        title = f"the side that listened, {report.address}"
        hosts += [Text(), Text(title, style="bold"), host(report.there)]
    trials = [part for trial in report.trials for part in (Text(), negotiated(trial))]
    said = "in order" if report.well else "NOT in order: see damaged, or the errors"
    return Group(*hosts, *trials, Text(), Text(said, style="bold"))


def _rows(shown: RenderableType, console: Console) -> int:
    return len(console.render_lines(shown, pad=False))


def _table(cut: bool) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=_MARK_COLUMNS, no_wrap=True)
    table.add_column(width=_NAME_COLUMNS)
    table.add_column(no_wrap=cut, overflow="ellipsis" if cut else "fold")
    return table


def _add_transport(table: Table, transport: Transport, brief: bool) -> None:
    state = "ok" if transport.available else "missing"
    text = transport.reason
    _add(table, state, transport.name, text, transport.remedy)
    for finding in transport.findings:
        if finding.state != "ok" or not brief:
            # Below the transport it belongs to.
            text = f"{finding.name}: {finding.text}"
            _add(table, finding.state, "", text, finding.remedy)


def _add_findings(table: Table, found: Sequence[Finding], brief: bool) -> None:
    for finding in found:
        if finding.state != "ok" or not brief:
            _add(table, finding.state, finding.name, finding.text, finding.remedy)
    well = ", ".join(finding.name for finding in found if finding.state == "ok")
    if brief and well:
        _add(table, "ok", "", well)


def _add(table: Table, state: str, name: str, text: str, remedy: str = "") -> None:
    table.add_row(Text(state, style=_MARK_STYLES[state]), _line(name), _line(text))
    if remedy:
        table.add_row("", "", _line(f"-> {remedy}"))


def _verdict(examination: Examination) -> Text:
    missing = list(examination.missing())
    if not missing:
        return Text("everything that the configuration asks for is here", "green")
    names = ", ".join(finding.name for finding in missing)
    return Text(f"missing, and the configuration asks for it: {names}", "bold red")


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
    """A row for each size, a column for each direction."""
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
