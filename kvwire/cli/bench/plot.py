"""A benchmark as a picture: rates as bars, times as points on a logarithmic axis.

The thin line of each goes from the smallest sample to the 99th percentile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvwire.cli.bench.case import Benchmark
from kvwire.cli.bench.summary import Summary
from kvwire.cli.bench.table import OURS, short
from kvwire.cli.bench.turns import CaseResult
from kvwire.cli.plot import colors, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[CaseResult]

_WIDTH_IN: Final = 8.0
BAR_IN: Final = 0.2
# The title and the axis of a panel; and what is above and below all of them.
PANEL_IN: Final = 0.7
AROUND_IN: Final = 0.8
# What is in the name of a contender beside its transport.
_WITH_TRANSPORT: Final = (OURS, "transfer")


def draw(benchmark: Benchmark, findings: Rows) -> dict[str, Figure]:
    """Draw a panel for each case, with a scale of its own.

    Returns:
        The picture, by what is added to the name of the file: nothing.
    """
    measured = [finding for finding in findings if finding.samples]
    heights = [PANEL_IN + BAR_IN * len(f.samples) for f in measured]
    figure = new_figure(_WIDTH_IN, AROUND_IN + sum(heights))
    figure.suptitle(f"kvwire bench {benchmark.name}: medians, lines from min to p99")
    panels = figure.subplots(len(measured), 1, squeeze=False, height_ratios=heights)
    shades = shades_of(measured)
    for axes, finding in zip(panels[:, 0], measured, strict=True):
        axes.set_title(f"{finding.case.name}, {finding.case.unit.name}", loc="left")
        draw_case(axes, finding, shades)
        axes.set_yticks(range(len(finding.samples)), list(finding.samples))
        finish(axes, len(finding.samples))
    return {"": figure}


def draw_case(
    axes: Axes, finding: CaseResult, shades: dict[str, str], begin: int = 0
) -> None:
    """Draw what everybody did in one case, from the line ``begin`` downwards."""
    unit = finding.case.unit
    for y, (name, samples) in enumerate(finding.samples.items(), begin):
        found = Summary.of([value * unit.scale for value in samples.values])
        shade = shades[contender(name)]
        if unit.less_is_better:
            axes.plot([found.median], [y], "o", color=shade)
        else:
            axes.barh(y, found.median, color=shade)
        axes.plot([found.low, found.p99], [y, y], color="black", linewidth=0.8)
        axes.annotate(
            short(found.median),
            (max(found.median, found.p99), y),
            xytext=(5, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize="small",
        )
    if unit.less_is_better:
        axes.set_xscale("log")


def finish(axes: Axes, lines: int) -> None:
    """Have the first of so many lines on top, and room for the numbers on the right."""
    axes.set_ylim(lines - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.margins(x=0.2)
    if axes.get_xscale() == "linear":
        axes.set_xlim(left=0)
    else:
        axes.xaxis.set_major_formatter("{x:,.0f}")


def shades_of(findings: Rows) -> dict[str, str]:
    """Give everybody who was measured a colour, whatever transport they used."""
    names = (contender(name) for f in findings for name in f.samples)
    return colors(list(dict.fromkeys([OURS, *names])))


def contender(name: str) -> str:
    """Shorten a name by its transport or tier: "kvwire disk" is kvwire."""
    first = name.partition(" ")[0]
    return first if first in _WITH_TRANSPORT else name
