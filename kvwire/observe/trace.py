"""The last events of processes as one file for Perfetto, or ``chrome://tracing``.

A process is a row. Each of its transfers and store calls is a slice on it, with an
instant for each mark, segment and lost link. An arrow leads from the producer's slice
to each consumer's slice in the same trace. Times are those of each host's own clock.

=================  ===================================================================
event              details
=================  ===================================================================
``begin``          its id, or the number of blocks; send, receive, put or get
``met``            the peer's name
``marked``         layers marked so far, layers
``sent``           first layer, layers, bytes of a segment
``acknowledged``   segments
``landed``         first layer, layers, bytes of a segment
``lost``           its connection
``end``            complete, partial, failed or over; bytes; the trace
=================  ===================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvwire.observe.inspect import ProcessTrace

_NS_PER_US: Final = 1000
# Names in the file for the numbers and texts of an event.
_NAMES: Final = {
    "begin": ("id", "side"),
    "met": ("peer",),
    "marked": ("marked", "layers"),
    "sent": ("layer", "layers", "bytes"),
    "acknowledged": ("segments",),
    "landed": ("layer", "layers", "bytes"),
    "end": ("outcome", "bytes", "trace"),
}
Row = dict[str, Any]


def document(processes: Sequence[ProcessTrace]) -> dict[str, Any]:
    """Return the document in Chrome's trace event format."""
    rows: list[Row] = []
    for number, process in enumerate(processes, 1):
        label = f"{process.name}, process {process.pid}"
        rows.append(_meta(number, 0, "process_name", label))
        rows.extend(_rows(number, process))
    return {"traceEvents": [*rows, *_arrows(rows)], "displayTimeUnit": "ms"}


def _rows(number: int, process: ProcessTrace) -> Iterator[Row]:
    """Yield the rows of a process, each slice on the first free track."""
    last_us = max((at for at, *_ in process.events), default=0) / _NS_PER_US
    slices: dict[str, Row] = {}
    instants: list[tuple[str, Row]] = []
    tracks: list[Row | None] = []
    for at_ns, what, key, more in process.events:
        at_us = at_ns / _NS_PER_US
        args = dict(zip(_NAMES.get(what, ()), more, strict=False))
        if what == "begin":
            track = next((t for t, busy in enumerate(tracks) if not busy), len(tracks))
            row = _slice(number, track + 1, at_us, args)
            row["dur"] = max(1.0, last_us - at_us)
            tracks[track : track + 1] = [row]
            slices[key] = row
        elif key in slices:  # otherwise it began before the oldest event kept
            row = slices[key]
            row["args"] |= args if what in ("met", "end") else {}
            if what == "end":
                row["dur"] = max(1.0, at_us - row["ts"])
                tracks[row["tid"] - 1] = None
            name = what if "layer" not in args else f"{what} layer {args['layer']}"
            instants.append((key, _instant(row, name, at_us, args)))
    for track in range(1, len(tracks) + 1):
        yield _meta(number, track, "thread_name", f"transfers {track}")
    yield from slices.values()
    yield from (row for _, row in instants)


def _slice(number: int, track: int, at_us: float, args: Row) -> Row:
    name = f"{args.get('side', '')} {args.get('id', '')}".strip()
    return {
        "ph": "X",
        "cat": "kvwire",
        "name": name,
        "pid": number,
        "tid": track,
        "ts": at_us,
        "args": args,
    }


def _instant(row: Row, name: str, at_us: float, args: Row) -> Row:
    where = {"pid": row["pid"], "tid": row["tid"], "ts": at_us}
    return {"ph": "i", "s": "t", "cat": "kvwire", "name": name, "args": args} | where


def _arrows(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield arrows between the ends of each transfer, matched by id and trace."""
    ends = [row for row in rows if row["ph"] == "X" and row["args"].get("trace")]
    sent = {
        (row["args"]["trace"], row["args"]["id"]): row
        for row in ends
        if row["args"]["side"] == "send"
    }
    for number, row in enumerate(ends):
        key = row["args"]["trace"], row["args"]["id"]
        if row["args"]["side"] != "receive" or key not in sent:
            continue
        source = sent[key]
        start_us = max(row["ts"], source["ts"])
        for phase, end in (("s", source), ("f", row)):
            where = {"pid": end["pid"], "tid": end["tid"]}
            stop_us = end["ts"] + end["dur"]
            arrow = {"ph": phase, "id": number, "cat": "kvwire", "name": "transfer"}
            yield arrow | where | {"ts": min(start_us, stop_us), "bp": "e"}


def _meta(number: int, track: int, what: str, text: str) -> Row:
    args = {"name": text}
    return {"ph": "M", "name": what, "pid": number, "tid": track, "args": args}
