"""Rate over the size of a fragment, for everybody: a panel for each wire and verb.

Full points are caches with a tensor for each layer, hollow ones blocks across layers.
Both axes are logarithmic: what matters is how many times faster one is than another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from kvwire.cli.bench.case import GIGABYTES_PER_SECOND, Benchmark
from kvwire.cli.bench.fragments import VERBS, WIRES, size_name
from kvwire.cli.bench.fragments_report import fragment_work
from kvwire.cli.bench.turns import CaseResult
from kvwire.cli.plot import colors, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Findings = Sequence[CaseResult]

_PANEL_IN: Final = (4.0, 3.4)
_LEGEND_IN: Final = 2.0
_MARKERS: Final = "osD^v<>Pp*"


def draw(benchmark: Benchmark, findings: Findings) -> dict[str, Figure]:
    """Draw everybody who was measured; a panel in which nobody was is left out.

    Returns:
        The picture, by what is added to the name of the file: nothing.
    """
    measured = [finding for finding in findings if finding.samples]
    wires = [w for w in WIRES if any(f.case.group == w for f in measured)]
    verbs = [v for v in VERBS if any(f.case.work.verb == v for f in measured)]
    names = [c.name for c in benchmark.contenders]
    present = {name for finding in measured for name in finding.samples}
    looks = _looks([name for name in names if name in present], benchmark.ours)
    width, height = _PANEL_IN
    figure = new_figure(len(verbs) * width + _LEGEND_IN, len(wires) * height)
    across = any(fragment_work(finding).cross_layer for finding in measured)
    hollow = "; hollow: blocks across layers" if across else ""
    figure.suptitle(f"kvwire bench fragments: median rates{hollow}")
    panels = figure.subplots(
        len(wires), len(verbs), squeeze=False, sharex=True, sharey=True
    )
    for wire, row in zip(wires, panels, strict=True):
        for verb, axes in zip(verbs, row, strict=True):
            axes.set_title(f"{verb}, {wire}, GB/s", loc="left")
            axes.grid(color="0.9")
            inside = [
                f for f in measured if (f.case.group, f.case.work.verb) == (wire, verb)
            ]
            for name, look in looks.items():
                _draw_lines(axes, name, look, inside)
        row[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    _scale(panels[0, 0], measured)
    return {"": figure}


def _looks(names: Sequence[str], ours: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Give everybody a colour and a marker of their own, and kvwire a bold line."""
    return {
        name: {
            "color": shade,
            "marker": _MARKERS[number % len(_MARKERS)],
            "linewidth": 2.2 if name in ours else 1.0,
            "markersize": 5,
        }
        for number, (name, shade) in enumerate(colors(names).items())
    }


def _draw_lines(
    axes: Axes, name: str, look: Mapping[str, Any], inside: Findings
) -> None:
    """Draw one contender's rates, in both layouts; only one of them is named."""
    named = False
    for cross_layer in (False, True):
        points = sorted(
            (
                fragment_work(f).layer_bytes,
                median(f.samples[name].values) * GIGABYTES_PER_SECOND.scale,
            )
            for f in inside
            if fragment_work(f).cross_layer is cross_layer and name in f.samples
        )
        if points:
            hollow = {"markerfacecolor": "white", "linestyle": "--"}
            axes.plot(
                *zip(*points, strict=True),
                label="_" * named + name,
                **{**look, **(hollow if cross_layer else {})},
            )
            named = True


def _scale(axes: Axes, measured: Findings) -> None:
    """Have sizes and powers of two along the axes, which all panels share."""
    sizes = sorted({fragment_work(f).layer_bytes for f in measured})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [size_name(size) for size in sizes], minor=False)
    axes.yaxis.set_major_formatter("{x:.2g}")
