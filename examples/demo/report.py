"""What the demo prints: a table, the texts, and where the pictures are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.demo.record import Record

# As much of a prompt as shows where the continuation begins.
_TAIL_CHARS = 240


def print_report(
    console: Console,
    records: Sequence[Record],
    prompts: dict[str, list[int]],
    to_text: Callable[[list[int]], str],
    files: Sequence[Path],
) -> None:
    """Print everything a person wants to see."""
    for record in records:
        prompt = to_text(prompts[record.request])
        new = to_text([token.token for token in record.tokens])
        console.print(_continuation(record.request, prompt, new))
    console.print(_table(records))
    console.print(
        "[dim]exposed: from the last layer's mark until decode knew the outcome\n"
        "overlap: prefill up to that mark / (the same + exposed)\n"
        "equal: the same new tokens as from one process alone[/dim]"
    )
    for record in records:
        if record.arrived.missing:
            console.print(_loss(record))
    for file in files:
        console.print(f"written: {file}", soft_wrap=True, highlight=False)


def summary(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The table as plain data, times in seconds."""
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


def _table(records: Sequence[Record]) -> Table:
    title = f"KV over {records[0].arrived.transport}, layer by layer; times in ms"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
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


def _loss(record: Record) -> Text:
    arrived = record.arrived
    ranges = ", ".join(f"{start} to {stop - 1}" for start, stop in arrived.to_prefill)
    return Text(
        f"{record.request}: blocks {arrived.missing[0]} to {arrived.missing[-1]} of "
        f"{arrived.blocks} did not arrive: {arrived.why}. The first "
        f"{arrived.usable_tokens} tokens were usable; decode prefilled {ranges}.",
        style="yellow",
    )


def _continuation(request: str, prompt: str, new: str) -> Panel:
    before = Text("..." + prompt[-_TAIL_CHARS:], style="dim")
    return Panel(Group(before + Text(new, style="bold")), title=request)
