"""The bars of a run as letters, as a picture, and as a trace.

The trace is in Chrome's event format, which https://ui.perfetto.dev opens. Compute is
slices on one track for each process. Transfers of neighbouring layers overlap, so they
are asynchronous events, with a track for each request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.console import Console
from rich.text import Text

from kvwire.cli.demo.record import Bar, RequestTimes
from kvwire.cli.plot import add_legend, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFILL, DECODE = 1, 2
_LABEL: Final = 9
_NOTE: Final = (
    "KV leaves as soon as it is written, before its layer's attention and MLP"
)


class _Look(NamedTuple):
    letter_color: str
    color: str
    label: str


_LOOKS: Final = {
    "prefill": _Look("blue", "#4c78a8", "computed by prefill"),
    "transfer": _Look("yellow", "#f58518", "on its way to decode"),
    "recompute": _Look("magenta", "#b279a2", "computed by decode, because it was lost"),
}


def timeline(record: RequestTimes, console: Console) -> Text:
    """Draw a request in letters: a row for each layer, compute above transfer.

    It is as wide as the console, and without Unicode or colours where that has none.
    """
    cells = console.width - _LABEL
    cell_s = (record.ended - record.began) / cells
    end = f"{(record.ended - record.began) * 1e3:.0f} ms"
    text = Text(f"{'':{_LABEL}}0 ms{end:>{cells - 4}}\n", no_wrap=True)
    for row in record.rows:
        bars = [bar for bar in record.bars() if bar.row == row]
        text.append(f"{row:<{_LABEL}}")
        for cell in range(cells):
            start = record.began + cell * cell_s
            here = {
                b.kind for b in bars if b.start < start + cell_s and start <= b.stop
            }
            text.append(*_letter(here, console))
        text.append("\n")
    return text


def _letter(kinds: Collection[str], console: Console) -> tuple[str, str]:
    """Compute is the upper half of a letter, a transfer the lower one."""
    upper, lower, both = "▀▄█" if console.encoding.startswith("utf") else "=~#"
    moving = _LOOKS["transfer"].letter_color
    computing = [_LOOKS[kind].letter_color for kind in kinds if kind != "transfer"]
    if not computing:
        return (lower, moving) if kinds else (" ", "")
    if "transfer" not in kinds:
        return upper, computing[0]
    if console.color_system is None:
        return both, ""
    return upper, f"{computing[0]} on {moving}"


def title(record: RequestTimes) -> str:
    """Write the line above the drawing of a request."""
    arrived = record.arrived
    text = f"{record.request}: prompt of {arrived.tokens + 1} tokens"
    if arrived.missing:
        return f"{text}, {len(arrived.missing)} of {arrived.blocks} blocks lost"
    return f"{text}, {arrived.nbytes / 1e6:.1f} MB of KV"


def draw(records: Sequence[RequestTimes]) -> Figure:
    """Draw a panel for each request, in the order they were prefilled."""
    ordered = sorted(records, key=lambda record: record.began)
    figure = new_figure(9.6, 0.9 + 2.0 * len(ordered))
    panels = figure.subplots(len(ordered), sharex=True, squeeze=False)[:, 0]
    for record, axes in zip(ordered, panels, strict=True):
        rows = record.rows
        for bar in record.bars():
            if bar.kind not in _LOOKS:
                continue
            top = rows.index(bar.row) - (0 if bar.kind == "transfer" else 0.4)
            # Thinner than a quarter of a millisecond is not seen.
            length_ms = max(0.25, (bar.stop - bar.start) * 1e3)
            span_ms = ((bar.start - record.began) * 1e3, length_ms)
            axes.broken_barh([span_ms], (top, 0.4), facecolors=_LOOKS[bar.kind].color)
        axes.set_yticks(range(len(rows)), rows, fontsize="small")
        axes.invert_yaxis()
        axes.set_title(title(record), loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(f"ms since the request's prefill began. {_NOTE}")
    add_legend(figure, {look.label: look.color for look in _LOOKS.values()})
    return figure


def trace(records: Sequence[RequestTimes]) -> dict[str, Any]:
    """All events; times in microseconds from the beginning of the first prefill."""
    zero = min(record.began for record in records)
    events = [
        {"ph": "M", "name": what, "pid": process, "tid": 1, "args": {"name": name}}
        for process, role in ((PREFILL, "prefill"), (DECODE, "decode"))
        for what, name in (
            ("process_name", f"{role} process"),
            ("thread_name", "compute"),
        )
    ]
    for record in records:
        for bar in record.bars():
            events += _events(record.request, bar, zero)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(request: str, bar: Bar, zero: float) -> Iterator[dict[str, Any]]:
    start_us, stop_us = (bar.start - zero) * 1e6, (bar.stop - zero) * 1e6
    if bar.kind == "transfer":
        common = {
            "name": bar.row,
            "cat": f"KV of {request}",
            "id": f"{request}/{bar.row}",
            "pid": DECODE,
            "tid": 1,
        }
        yield common | {"ph": "b", "ts": start_us}
        yield common | {"ph": "e", "ts": stop_us}
        return
    yield {
        "ph": "X",
        "name": f"{request} {bar.row}",
        "cat": bar.kind,
        "pid": PREFILL if bar.kind == "prefill" else DECODE,
        "tid": 1,
        "ts": start_us,
        "dur": stop_us - start_us,
        "args": {"tokens": bar.tokens},
    }
