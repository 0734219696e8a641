"""``kvwire bench store`` as pictures: a row for each tier, a column for each size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvwire.cli.bench.case import Benchmark
from kvwire.cli.bench.plot import (
    AROUND_IN,
    BAR_IN,
    PANEL_IN,
    Rows,
    contender,
    draw_case,
    finish,
    shades_of,
)
from kvwire.cli.bench.store_report import size_of, store_work
from kvwire.cli.plot import add_legend, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMN_IN: Final = 4.5


def draw(benchmark: Benchmark, findings: Rows) -> dict[str, Figure]:
    """Draw one picture of rates and one of times.

    Returns:
        The pictures, by what is added to the name of the file.
    """
    title, shades = f"kvwire bench {benchmark.name}", shades_of(findings)
    rates = [f for f in findings if not f.case.unit.less_is_better]
    times = [f for f in findings if f.case.unit.less_is_better]
    return {
        "": _draw_tiers(f"{title}: rates, GB/s", rates, shades),
        "-times": _draw_tiers(f"{title}: times, us", times, shades),
    }


def _draw_tiers(title: str, findings: Rows, shades: dict[str, str]) -> Figure:
    panels: dict[str, dict[str, Rows]] = {}
    for finding in findings:
        work = store_work(finding)
        columns = panels.setdefault(work.tier, {})
        columns[size_of(work)] = [*columns.get(size_of(work), ()), finding]
    sizes = list(dict.fromkeys(size for columns in panels.values() for size in columns))
    heights = [max(map(_height_in, columns.values())) for columns in panels.values()]
    figure = new_figure(_COLUMN_IN * len(sizes), AROUND_IN + sum(heights))
    figure.suptitle(f"{title}; medians, lines from min to p99")
    axes = figure.subplots(
        len(panels), len(sizes), squeeze=False, height_ratios=heights
    )
    for row, (tier, columns) in zip(axes, panels.items(), strict=True):
        for panel, size in zip(row, sizes, strict=True):
            if size in columns:
                panel.set_title(f"{tier}, {size}", loc="left")
                _draw_panel(panel, columns[size], shades)
            else:
                panel.set_axis_off()
    present = {contender(name) for f in findings for name in f.samples}
    add_legend(figure, {n: shade for n, shade in shades.items() if n in present})
    return figure


def _height_in(findings: Rows) -> float:
    return PANEL_IN + BAR_IN * sum(len(f.samples) + 1 for f in findings)


def _draw_panel(axes: Axes, findings: Rows, shades: dict[str, str]) -> None:
    """Draw a group of lines for each work, with its verb beside the middle one."""
    ticks, begin = [], 0
    for finding in findings:
        draw_case(axes, finding, shades, begin)
        ticks.append(begin + (len(finding.samples) - 1) / 2)
        begin += len(finding.samples) + 1
    axes.set_yticks(ticks, [finding.case.work.verb for finding in findings])
    finish(axes, begin - 1)
