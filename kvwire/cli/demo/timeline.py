"""A request as a timeline of letters: a row for each layer, compute above transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from kvwire.cli.demo.record import Bar, RequestTimes

COLORS: Final = {"compute": "blue", "transfer": "yellow", "recompute": "magenta"}
_LABEL: Final = 9


def timeline(record: RequestTimes, console: Console) -> Text:
    """As wide as the console; without Unicode or colours where it has none."""
    cells = console.width - _LABEL
    cell_s = (record.ended - record.began) / cells
    end = f"{(record.ended - record.began) * 1e3:.0f} ms"
    text = Text(f"{'':{_LABEL}}0 ms{end:>{cells - 4}}\n", no_wrap=True)
    for row, label in enumerate(record.rows):
        bars = [bar for bar in record.bars() if bar.row == row]
        text.append(f"{label:<{_LABEL}}")
        for cell in range(cells):
            start = record.began + cell * cell_s
            here = [bar.kind for bar in bars if _meets(bar, start, start + cell_s)]
            text.append(*_letter(here, console))
        text.append("\n")
    return text


def _meets(bar: Bar, start: float, stop: float) -> bool:
    return bar.start < stop and start <= bar.stop


def _letter(kinds: Sequence[str], console: Console) -> tuple[str, str]:
    """Compute is the upper half of a letter, a transfer the lower one."""
    upper, lower, both = "▀▄█" if console.encoding.startswith("utf") else "=~#"
    moves = "transfer" in kinds
    computes = next((kind for kind in kinds if kind != "transfer"), None)
    match moves, computes:
        case True, None:
            return lower, COLORS["transfer"]
        case False, str(kind):
            return upper, COLORS[kind]
        case True, str(kind):
            if console.color_system is None:
                return both, ""
            return upper, f"{COLORS[kind]} on {COLORS['transfer']}"
    return " ", ""
