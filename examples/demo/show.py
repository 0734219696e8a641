"""What the demo shows of a run: its texts, a table, timelines, a picture, and a trace.

The trace is in Chrome's event format, which https://ui.perfetto.dev opens. Compute is
slices on one track for each process. Transfers of neighbouring layers overlap, so they
are asynchronous events, with a track for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from demo.lines import Arrived
from demo.plot import add_legend, new_figure
from demo.record import Bar, RequestTimes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFILL, DECODE = 1, 2
_LABEL: Final = 9
_NOTE: Final = (
    "KV leaves as soon as it is written, before its layer's attention and MLP"
)

LEGEND: Final = (
    "upper half: computed, by prefill or, what was lost, by decode",
    "lower half: on its way to decode; a layer leaves as soon as its keys and values",
    "are written, before its attention and MLP are computed",
)
# As much of a prompt as shows where the continuation begins.
_TAIL_CHARS: Final = 160


class _Look(NamedTuple):
    letter_color: str
    color: str
    label: str


_LOOKS: Final = {
    "prefill": _Look("blue", "#4c78a8", "computed by prefill"),
    "transfer": _Look("yellow", "#f58518", "on its way to decode"),
    "recompute": _Look("magenta", "#b279a2", "computed by decode, because it was lost"),
}


def print_report(
    console: Console,
    records: Sequence[RequestTimes],
    prompts: dict[str, list[int]],
    to_text: Callable[[list[int]], str],
) -> None:
    """Print everything a person wants to see."""
    whole = [record for record in records if not record.arrived.missing]
    broken = [record for record in records if record.arrived.missing]
    for record in (*whole[:1], *broken):
        prompt = to_text(prompts[record.request])
        new = to_text([token.token for token in record.tokens])
        console.print(_continuation(record.request, prompt, new))
        console.print(Text(title(record), style="bold"))
        console.print(timeline(record, console))
    console.print(Text("\n".join(LEGEND), style="dim"))
    console.print(_table(records))
    for line in _shown(records):
        console.print(f"* {line}", highlight=False)


def summary(records: Sequence[RequestTimes]) -> list[dict[str, Any]]:
    """Return the table as plain data, times in seconds."""
    return [
        {
            "request": record.request,
            "prompt_tokens": record.arrived.tokens + 1,
            "new_tokens": len(record.tokens),
            "layers": len(record.marked),
            "layers_grouped": record.arrived.layers_grouped,
            "transport": record.arrived.transport,
            "bytes": record.arrived.nbytes,
            "wire_s": record.arrived.wire_s,
            "prefill_s": record.spans[-1].stop - record.began,
            "exposed_s": record.exposed_s,
            "overlap_efficiency": record.overlap_efficiency,
            "lost_blocks": record.arrived.missing,
            "usable_tokens": record.arrived.usable_tokens,
            "prefilled_by_decode": record.arrived.to_prefill,
            "equal": record.equal,
        }
        for record in records
    ]


def _table(records: Sequence[RequestTimes]) -> Table:
    heading = f"KV over {records[0].arrived.transport}, layer by layer; times in ms"
    table = Table(title=heading, box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    table.add_column("request", no_wrap=True)
    for name in ("tokens", "layers", "MB", "prefill", "exposed", "overlap", "blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("equal")
    for record in records:
        row, arrived = summary([record])[0], record.arrived
        here = arrived.blocks - len(arrived.missing)
        table.add_row(
            record.request,
            str(row["prompt_tokens"]),
            str(row["layers"]),
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['prefill_s'] * 1e3:.1f}",
            f"{row['exposed_s'] * 1e3:.2f}",
            f"{row['overlap_efficiency']:.3f}",
            f"{here}/{arrived.blocks}",
            "[green]yes[/]" if record.equal else "[red]NO[/]",
        )
    return table


def _shown(records: Sequence[RequestTimes]) -> Iterator[str]:
    """Say what a reader should take home, in sentences."""
    equal = sum(record.equal for record in records)
    new = len(records[0].tokens)
    yield (
        f"Tokens: {equal} of {len(records)} requests have the same {new} new tokens as "
        "in one process alone."
    )
    prefill_ms = median((r.marked[-1] - r.began) * 1e3 for r in records)
    exposed_ms = median(r.exposed_s * 1e3 for r in records)
    yield (
        f"Overlap: KV moved while prefill computed, {prefill_ms:.0f} ms up to the last "
        f"layer's KV; {exposed_ms:.1f} ms after that, decode had all of it (medians)."
    )
    for record in records:
        arrived = record.arrived
        if arrived.missing:
            yield (
                f"Loss: of {record.request}, blocks {arrived.missing[0]} to "
                f"{arrived.missing[-1]} of {arrived.blocks} did not arrive "
                f"({arrived.why}). The first {arrived.usable_tokens} tokens were "
                f"usable; decode computed {_ranges(arrived)}, and went on."
            )


def _ranges(arrived: Arrived) -> str:
    ranges = [f"{start} to {stop - 1}" for start, stop in arrived.to_prefill]
    return f"tokens {', '.join(ranges)}"


def _continuation(request: str, prompt: str, new: str) -> Panel:
    before = Text("..." + prompt[-_TAIL_CHARS:], style="dim")
    return Panel(before + Text(new.rstrip(), style="bold"), title=request)


# --- timelines ------------------------------------------------------------------------


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
    """Return all events; times in microseconds since the first prefill began."""
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
