"""The content of ``kvwire top``: tables, for a terminal and for a page in a browser.

Nothing here reads the clock or a socket. A view is built from processes' snapshots;
a package builds the tables of its own server.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from kvwire import Snapshot
from kvwire.errors import printable
from kvwire.types import in_bytes

NOBODY: Final = "no process answers: were they started with KVWIRE_INSPECT?"
# What a transfer waits for, other than its peer.
_OWN: Final = {"program": "its own program", "device": "its device"}
# How often an idle link sends a PING.
_PING_S: Final = 2.0
_SILENT_S: Final = 2 * _PING_S
# Rates cover at least this time, so that several readers do not disturb each other, and
# at most this time, after which there was no reader.
_RATE_S: Final = 0.5
_RATE_S_MAX: Final = 10.0


class Marked(msgspec.Struct, frozen=True, omit_defaults=True):
    """A table cell's text, with a bar, a plot or an alarm.

    Attributes:
        text: The text.
        share: How full or how far something is, from 0 to 1; shown as a bar.
        plot: A number that is plotted over the last minutes.
        alarm: Whether it needs attention.
    """

    text: str
    share: float | None = None
    plot: float | None = None
    alarm: bool = False


Cell: TypeAlias = str | Marked


def text_of(cell: Cell) -> str:
    """Return the text of a cell."""
    return cell if isinstance(cell, str) else cell.text


class Column(msgspec.Struct, frozen=True, omit_defaults=True):
    """A column's head.

    Attributes:
        name: Its name.
        about: Its meaning, if the name does not make it clear.
        number: Whether its texts are numbers.
    """

    name: str
    about: str = ""
    number: bool = False


class Row(msgspec.Struct, frozen=True):
    """A row of a table.

    Attributes:
        key: Identifies the row in later views.
        cells: A text for each column; printable, even if a peer has chosen it.
    """

    key: str
    cells: tuple[Cell, ...]

    @classmethod
    def of(cls, key: str, *cells: Cell) -> Row:
        """Return a row, with texts of peers made printable."""
        return cls(printable(key), tuple(map(_printable, cells)))


class TopTable(msgspec.Struct, frozen=True, omit_defaults=True):
    """A table.

    Attributes:
        name: A word for it, such as ``"transfers"``.
        title: Its title.
        columns: Its columns.
        rows: Its rows, the most urgent first.
        total: The number of rows before any were left out.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    total: int = 0


class TopView(msgspec.Struct, frozen=True):
    """Everything that is shown at one time.

    Attributes:
        name: The subject, such as a server's name.
        tables: The tables; some may have no rows.
        notes: Sentences about facts that are in no table.
    """

    name: str
    tables: tuple[TopTable, ...]
    notes: tuple[str, ...] = ()


class RateMemory:
    """Keeps earlier snapshots, so that a view can show rates. Thread-safe."""

    def __init__(self, most_s: float = _RATE_S_MAX) -> None:
        self._lock = threading.Lock()
        self._most_s = most_s
        # By incarnation. bounded: by the processes of the last call
        self._last: dict[str, Snapshot] = {}
        self._before: dict[str, Snapshot] = {}

    def before(self, found: Sequence[Snapshot]) -> Sequence[Snapshot]:
        """Return earlier snapshots of the same processes, and store these."""
        with self._lock:
            before: dict[str, Snapshot] = {}
            last: dict[str, Snapshot] = {}
            for one in found:
                key = one.incarnation
                old = self._last.get(key)
                if old is not None and one.at_s - old.at_s < _RATE_S:
                    last[key] = old
                    old = self._before.get(key)
                else:
                    last[key] = one
                if old is not None and one.at_s - old.at_s < self._most_s:
                    before[key] = old
            self._last = last
            self._before = before
            return tuple(before.values())


class Wait(msgspec.Struct, frozen=True):
    """A reason why something does not continue.

    Attributes:
        who: The party that waits.
        on: The party or thing that it waits for.
        what: The delayed work, such as a transfer.
        age_s: For how many seconds; None if unknown.
        why: The event that has to happen next, as text.
        alarm: Whether it may wait for ever.
    """

    who: str
    on: str
    what: str
    age_s: float | None
    why: str
    alarm: bool = False


def waits_table(waits: Iterable[Wait]) -> TopTable:
    """Return a table of waits with their reasons: a row per pair, longest first."""
    groups: dict[tuple[str, str], list[Wait]] = {}
    for one in waits:
        groups.setdefault((one.who, one.on), []).append(one)
    aged: list[tuple[float, Row]] = []
    for (who, on), group in groups.items():
        longest = max(group, key=lambda wait: wait.age_s or 0.0)
        more = f" and {len(group) - 1:,} more" if len(group) > 1 else ""
        age = "-" if longest.age_s is None else f"{longest.age_s:.1f} s"
        row = Row.of(
            f"{who} {on}",
            who,
            on,
            printable(longest.what) + more,
            Marked(age, alarm=any(wait.alarm for wait in group)),
            longest.why,
        )
        aged.append((longest.age_s or 0.0, row))
    return TopTable(
        "waits",
        "Who waits for whom, and why",
        (
            Column("who"),
            Column("waits for"),
            Column("with"),
            Column("for", "how long the oldest has waited", number=True),
            Column("because", "what the oldest needs next"),
        ),
        oldest_first(aged),
    )


def oldest_first(aged: Iterable[tuple[float, Row]]) -> tuple[Row, ...]:
    """Return rows with the oldest first; rows of equal age keep their order."""
    rows = sorted(aged, key=lambda item: (-round(item[0], 1), item[1].key))
    return tuple(row for _, row in rows)


# --- processes ------------------------------------------------------------------------


def process_tables(
    found: Sequence[Snapshot], before: Sequence[Snapshot]
) -> tuple[TopTable, ...]:
    """Return a table for each kind of open object.

    Args:
        found: The processes now.
        before: The same processes a moment earlier, for rates.
    """
    return (
        waits_table(_waits(found)),
        _processes(found, before),
        _transfers(found),
        _parts(found),
        _connections(found),
    )


def process_view(
    found: Sequence[Snapshot], before: Sequence[Snapshot], silent: Iterable[str]
) -> TopView:
    """Return the view of live processes.

    Args:
        found: The processes now.
        before: The same processes a moment earlier, for rates.
        silent: Sentences about the processes that did not answer.
    """
    number = f"{len(found)} process{'' if len(found) == 1 else 'es'}"
    notes = (*silent, *(() if found else (NOBODY,)))
    return TopView(number, process_tables(found, before), tuple(map(printable, notes)))


def _waits(found: Sequence[Snapshot]) -> Iterator[Wait]:
    # Why producers wait, by producer and transfer: consumers show it too.
    at_producers = {
        (one.name, transfer.id): f"; at {one.name}, {transfer.waits_for}"
        for one in found
        for transfer in one.transfers
        if transfer.side == "outgoing" and transfer.waits_on in _OWN
    }
    for one in found:
        silent = {row.peer for row in one.connections if row.silent_s > _SILENT_S}
        for transfer in one.transfers:
            more = ""
            if transfer.side == "incoming" and transfer.peers:
                more = at_producers.get((transfer.peers[0], transfer.id), "")
            yield Wait(
                one.name,
                _OWN.get(transfer.waits_on) or ", ".join(transfer.peers) or "a peer",
                f"transfer {transfer.id}",
                transfer.age_s,
                transfer.waits_for + more,
                alarm=not silent.isdisjoint(transfer.peers),
            )
        for part in one.parts:
            trouble = [f"{name}: {reason}" for name, reason in part.trouble.items()]
            for call in part.calls:
                yield Wait(
                    one.name,
                    f"the {part.kind} {part.name}",
                    call.text,
                    call.age_s,
                    "; ".join(trouble) or "it is under way",
                    alarm=bool(trouble),
                )
        for name in one.asked:
            why = "a peer has asked for it, and it is not published here"
            yield Wait("a peer", one.name, f"transfer {name}", None, why)


def _processes(found: Sequence[Snapshot], before: Sequence[Snapshot]) -> TopTable:
    earlier = {one.incarnation: one for one in before}
    rows: list[Row] = []
    for one in found:
        rates: list[Cell] = ["-", "-"]
        old = earlier.get(one.incarnation)
        if old is not None and one.at_s > old.at_s:
            spent_s = one.at_s - old.at_s
            per_s = [
                max(0, int((one.counters[key] - old.counters[key]) / spent_s))
                for key in ("received_bytes", "sent_bytes")
            ]
            rates = [Marked(in_bytes(rate), plot=rate) for rate in per_s]
        failed = one.counters["transfers_partial"] + one.counters["transfers_failed"]
        row = Row.of(
            one.incarnation,
            one.name,
            str(one.pid),
            str(one.open_connections),
            str(one.open_transfers),
            str(one.counters["transfers_complete"]),
            str(failed),
            *rates,
        )
        rows.append(row)
    return TopTable(
        "processes",
        "Processes",
        (
            Column("process"),
            Column("pid", number=True),
            Column("conns", "connections that are open", number=True),
            Column("open", "transfers without an outcome", number=True),
            Column("done", "transfers that are complete", number=True),
            Column("failed", "transfers that lack blocks", number=True),
            Column("in/s", "KV bytes that landed, per second", number=True),
            Column(
                "out/s", "KV bytes that peers have received, per second", number=True
            ),
        ),
        tuple(rows),
    )


def _transfers(found: Sequence[Snapshot]) -> TopTable:
    aged: list[tuple[float, Row]] = []
    for one in found:
        for row in one.transfers:
            way = "to" if row.side == "outgoing" else "from"
            peers = ", ".join(row.peers)
            share = share_of(row.landed_bytes, row.nbytes) or 0.0
            made = Row.of(
                f"{one.incarnation} {row.side} {row.id}",
                one.name,
                f"{row.id} {way} {peers}" if peers else row.id,
                f"{row.layers_landed}/{row.layers_marked}/{row.layers}",
                Marked(
                    f"{in_bytes(row.landed_bytes)}/{in_bytes(row.nbytes)}",
                    share=share,
                ),
                f"{row.age_s:.1f} s",
                row.waits_for,
            )
            aged.append((row.age_s, made))
    total = sum(one.open_transfers for one in found)
    return TopTable(
        "transfers",
        "Open transfers, the oldest first",
        (
            Column("process"),
            Column("transfer"),
            Column("layers", "landed/marked/all", number=True),
            Column("bytes", "landed/all", number=True),
            Column("age", number=True),
            Column("waits for"),
        ),
        oldest_first(aged),
        total if total > len(aged) else 0,
    )


def _parts(found: Sequence[Snapshot]) -> TopTable:
    rows: list[Row] = []
    for one in found:
        for part in one.parts:
            calls = ", ".join(f"{c.text} {c.age_s:.1f} s" for c in part.calls[:3])
            trouble = "; ".join(part.trouble.values())
            made = Row.of(
                f"{one.incarnation} {part.kind} {part.name}",
                one.name,
                f"{part.kind} {part.name}",
                calls or "-",
                part.summary,
                Marked(trouble, alarm=bool(trouble)),
            )
            rows.append(made)
    return TopTable(
        "parts",
        "Stores and other parts",
        (
            Column("process"),
            Column("part"),
            Column("calls", "the oldest running calls"),
            Column("so far"),
            Column("trouble", "the last failure of a part's member"),
        ),
        tuple(rows),
    )


def _connections(found: Sequence[Snapshot]) -> TopTable:
    rows: list[Row] = []
    for one in found:
        for number, row in enumerate(one.connections):
            silent = f"{row.silent_s:.1f} s"
            made = Row.of(
                f"{one.incarnation} {number} {row.peer}",
                one.name,
                row.peer,
                row.transport,
                f"{row.age_s:.0f} s",
                Marked(silent, alarm=row.silent_s > _SILENT_S),
                in_bytes(row.queued_bytes),
                str(row.unreceived),
            )
            rows.append(made)
    total = sum(one.open_connections for one in found)
    return TopTable(
        "connections",
        "Connections",
        (
            Column("process"),
            Column("peer"),
            Column("over", "the transport that carries its data now"),
            Column("age", number=True),
            Column("silent", "since the peer last sent anything", number=True),
            Column("queued", "bytes that are not sent yet", number=True),
            Column("unreceived", "messages that wait to be received", number=True),
        ),
        tuple(rows),
        total if total > len(rows) else 0,
    )


def share_of(used_bytes: int, most_bytes: int) -> float | None:
    """Return the used share, for a bar; None without a limit."""
    return min(1.0, used_bytes / most_bytes) if most_bytes else None


def _printable(cell: Cell) -> Cell:
    if isinstance(cell, str):
        return printable(cell)
    text = printable(cell.text)
    return cell if text == cell.text else msgspec.structs.replace(cell, text=text)
