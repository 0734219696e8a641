"""The terminal output of a run: its texts, a table and timelines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import median
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from demo.lines import Arrived
from demo.record import RequestTimes

_LABEL: Final = 9

LEGEND: Final = (
    "upper half: computed, by prefill or, if it was lost, by decode",
    "lower half: on its way to decode; a layer leaves as soon as its keys and values",
    "are written, before its attention and MLP are computed",
)
# The part of a prompt that is shown before its continuation.
_TAIL_CHARS: Final = 160


_COLORS: Final = {"prefill": "blue", "transfer": "yellow", "recompute": "magenta"}


def print_report(
    console: Console,
    records: Sequence[RequestTimes],
    prompts: dict[str, list[int]],
    to_text: Callable[[list[int]], str],
) -> None:
    """Print the complete report for people."""
    whole = [record for record in records if not record.arrived.missing]
    broken = [record for record in records if record.arrived.missing]
    for record in (*whole[:1], *broken):
        prompt = to_text(prompts[record.request])
        new = to_text(record.tokens)
        console.print(_continuation(record.request, prompt, new))
        console.print(Text(title(record), style="bold"))
        console.print(timeline(record, console))
    console.print(Text("\n".join(LEGEND), style="dim"))
    console.print(_table(records))
    for line in _shown(records):
        console.print(f"* {line}", highlight=False)


def summary(records: Sequence[RequestTimes]) -> list[dict[str, Any]]:
    """Return the table as plain data, with times in seconds."""
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
        row = summary([record])[0]
        arrived = record.arrived
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
    """Yield the most important results, as sentences."""
    equal = sum(record.equal for record in records)
    new = len(records[0].tokens)
    yield (
        f"Tokens: in {equal} of {len(records)} requests the {new} new tokens are the "
        "same as in one process alone."
    )
    prefill_ms = median((r.marked[-1] - r.began) * 1e3 for r in records)
    exposed_ms = median(r.exposed_s * 1e3 for r in records)
    yield (
        f"Overlap: KV moved while prefill computed, {prefill_ms:.0f} ms up to the "
        f"last layer's KV; {exposed_ms:.1f} ms later, decode had all of it (medians)."
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
    """Draw a request in characters: one row per layer, with computation above transfer.

    The drawing is as wide as the console, and uses Unicode and colours only if the
    console supports them.
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
    """Return a character: upper half for computation, lower half for a transfer."""
    upper, lower, both = "▀▄█" if console.encoding.startswith("utf") else "=~#"
    moving = _COLORS["transfer"]
    computing = [_COLORS[kind] for kind in kinds if kind != "transfer"]
    if not computing:
        return (lower, moving) if kinds else (" ", "")
    if "transfer" not in kinds:
        return upper, computing[0]
    if console.color_system is None:
        return both, ""
    return upper, f"{computing[0]} on {moving}"


def title(record: RequestTimes) -> str:
    """Return the line above a request's drawing."""
    arrived = record.arrived
    text = f"{record.request}: prompt of {arrived.tokens + 1} tokens"
    if arrived.missing:
        return f"{text}, {len(arrived.missing)} of {arrived.blocks} blocks lost"
    return f"{text}, {arrived.nbytes / 1e6:.1f} MB of KV"
