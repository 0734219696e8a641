"""Pictures of benchmarks: rates as bars, times as points on a logarithmic axis.

The thin line of each goes from the smallest sample to the 99th percentile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvwire.cli.bench.turns import Benchmark, CaseResult, Findings, Samples, Unit
from kvwire.cli.plot import add_legend, colors, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN: Final = 9.0
_BAR_IN: Final = 0.2
# The title and the axis of a panel; and what is above and below all of them.
_PANEL_IN: Final = 0.7
_AROUND_IN: Final = 0.8


def draw(benchmark: Benchmark, findings: Findings) -> Figure:
    """Draw a panel for each group and unit, in which everybody has a colour."""
    panels: dict[str, list[CaseResult]] = {}
    for row in findings:
        if row.samples:
            title = f"{row.case.group} {row.case.unit.name}".strip()
            panels.setdefault(title, []).append(row)
    heights = [
        _PANEL_IN + _BAR_IN * sum(len(row.samples) + 1 for row in panel)
        for panel in panels.values()
    ]
    shades = colors(list(dict.fromkeys(name for f in findings for name in f.samples)))
    figure = new_figure(_WIDTH_IN, _AROUND_IN + sum(heights))
    figure.suptitle(f"kvwire bench {benchmark.name}: medians, lines from min to p99")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for one, (title, panel) in zip(axes[:, 0], panels.items(), strict=True):
        one.set_title(title, loc="left")
        _draw_panel(one, panel, panel[0].case.unit, shades)
    add_legend(figure, shades)
    return figure


def _draw_panel(axes: Axes, rows: Findings, unit: Unit, shades: dict[str, str]) -> None:
    """Draw a group of lines for each row, with its name beside the middle one."""
    ticks, y = [], 0
    for row in rows:
        ticks.append(y + (len(row.samples) - 1) / 2)
        for name, samples in row.samples.items():
            _draw_line(axes, y, samples, unit, shades[name])
            y += 1
        y += 1
    axes.set_yticks(ticks, [row.case.name for row in rows])
    # The first on top, and room for the numbers on the right.
    axes.set_ylim(y - 1.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.margins(x=0.2)
    if unit.less_is_better:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.3g}")
    else:
        axes.set_xlim(left=0)


def _draw_line(axes: Axes, y: int, samples: Samples, unit: Unit, shade: str) -> None:
    middle, high = samples.median * unit.scale, samples.p99 * unit.scale
    if unit.less_is_better:
        axes.plot([middle], [y], "o", color=shade)
    else:
        axes.barh(y, middle, color=shade)
    low = min(samples.values) * unit.scale
    axes.plot([low, high], [y, y], color="black", linewidth=0.8)
    axes.annotate(
        f"{middle:.3g}",
        (max(middle, high), y),
        xytext=(5, 0),
        textcoords="offset points",
        verticalalignment="center",
        fontsize="small",
    )
