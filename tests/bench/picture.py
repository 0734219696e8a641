"""``python -m tests.bench picture``: what a benchmark has written, as a picture.

Rates are bars, times points on a logarithmic axis, each in panels of their own. The
thin line of each goes from the smallest sample to the 99th percentile.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from demo.plot import add_legend, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN: Final = 9.0
_BAR_IN: Final = 0.2
# The title and the axis of a panel; and what is above and below all of them.
_PANEL_IN: Final = 0.7
_AROUND_IN: Final = 0.8
SECONDS: Final = "s"
# What is shown of the document's seconds and bytes a second.
_UNITS: Final = {SECONDS: ("us", 1e6), "B/s": ("GB/s", 1e-9)}

Row = Mapping[str, Any]


def command(document: Path, picture: Path, /) -> None:
    """Draw a document of ``--json``.

    Args:
        document: What the benchmark has written.
        picture: The file of the picture: .svg, .png or .pdf.
    """
    save(draw(json.loads(document.read_text())), picture)


def draw(document: Mapping[str, Any]) -> Figure:
    """Draw a panel for each group and unit, in which everybody has a colour."""
    panels: dict[str, list[Row]] = {}
    for row in document["cases"]:
        if row["contenders"]:
            title = f"{row['group']} {_UNITS[row['unit']][0]}".strip()
            panels.setdefault(title, []).append(row)
    heights = [
        _PANEL_IN + _BAR_IN * sum(len(row["contenders"]) + 1 for row in panel)
        for panel in panels.values()
    ]
    names = (
        name for rows in panels.values() for row in rows for name in row["contenders"]
    )
    shades = colors(list(dict.fromkeys(names)))
    figure = new_figure(_WIDTH_IN, _AROUND_IN + sum(heights))
    figure.suptitle(f"{document['benchmark']}: medians, lines from min to p99")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for one, (title, panel) in zip(axes[:, 0], panels.items(), strict=True):
        one.set_title(title, loc="left")
        _draw_panel(one, panel, shades)
    add_legend(figure, shades)
    return figure


def _draw_panel(axes: Axes, rows: Sequence[Row], shades: dict[str, str]) -> None:
    """Draw a group of lines for each row, with its name beside the middle one."""
    is_time, (_, scale) = rows[0]["unit"] == SECONDS, _UNITS[rows[0]["unit"]]
    ticks, y = [], 0
    for row in rows:
        ticks.append(y + (len(row["contenders"]) - 1) / 2)
        for name, samples in row["contenders"].items():
            middle, low, high = (
                samples[key] * scale for key in ("median", "low", "p99")
            )
            if is_time:
                axes.plot([middle], [y], "o", color=shades[name])
            else:
                axes.barh(y, middle, color=shades[name])
            axes.plot([low, high], [y, y], color="black", linewidth=0.8)
            label = f"  {middle:.3g}"
            axes.text(max(middle, high), y, label, va="center", fontsize="small")
            y += 1
        y += 1
    axes.set_yticks(ticks, [row["name"] for row in rows])
    # The first on top, and room for the numbers on the right.
    axes.set_ylim(y - 1.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.margins(x=0.2)
    if is_time:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.3g}")
    else:
        axes.set_xlim(left=0)


def colors(names: Sequence[str]) -> dict[str, str]:
    """Give each name a colour of its own, the clearest ones first."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    clear = [*range(0, 20, 2), *range(1, 20, 2)]
    if len(names) > len(clear):
        hues = [i / len(names) for i in range(len(names))]
        return dict(zip(names, map(to_hex, colormaps["hsv"](hues)), strict=True))
    palette = map(to_hex, colormaps["tab20"](clear[: len(names)]))
    return dict(zip(names, palette, strict=True))
