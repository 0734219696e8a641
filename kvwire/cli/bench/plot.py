"""Pictures of benchmarks: rates as bars, times as points on a logarithmic axis.

The thin line of each goes from the smallest sample to the 99th percentile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvwire.cli.bench.turns import Benchmark, CaseResult, Samples, Unit
from kvwire.cli.plot import add_legend, colors, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN: Final = 9.0
_BAR_IN: Final = 0.2
# The title and the axis of a panel; and what is above and below all of them.
_PANEL_IN: Final = 0.7
_AROUND_IN: Final = 0.8


def draw(benchmark: Benchmark, findings: Sequence[CaseResult]) -> dict[str, Figure]:
    """Draw a picture of rates and one of times, by what is added to the file's name."""
    rates = [f for f in findings if f.samples and not f.case.unit.less_is_better]
    times = [f for f in findings if f.samples and f.case.unit.less_is_better]
    names = list(dict.fromkeys(name for f in findings for name in f.samples))
    shades, title = colors(names), f"kvwire bench {benchmark.name}"
    if not rates:
        return {"": _draw(title, times, shades)}
    pictures = {"": _draw(title, rates, shades)}
    return {**pictures, "-times": _draw(title, times, shades)} if times else pictures


def _draw(title: str, rows: Sequence[CaseResult], shades: dict[str, str]) -> Figure:
    """Draw a panel for each group, in which everybody has a colour."""
    groups = list(dict.fromkeys(row.case.group for row in rows))
    panels = [[row for row in rows if row.case.group == group] for group in groups]
    heights = [
        _PANEL_IN + _BAR_IN * sum(len(row.samples) + 1 for row in panel)
        for panel in panels
    ]
    figure = new_figure(_WIDTH_IN, _AROUND_IN + sum(heights))
    figure.suptitle(f"{title}: medians, lines from min to p99")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for one, group, panel in zip(axes[:, 0], groups, panels, strict=True):
        unit = panel[0].case.unit
        one.set_title(f"{group} {unit.name}".strip(), loc="left")
        _draw_panel(one, panel, unit, shades)
    present = {name for row in rows for name in row.samples}
    add_legend(figure, {n: shade for n, shade in shades.items() if n in present})
    return figure


def _draw_panel(
    axes: Axes, rows: Sequence[CaseResult], unit: Unit, shades: dict[str, str]
) -> None:
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
