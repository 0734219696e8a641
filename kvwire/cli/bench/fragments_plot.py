"""Rate over the size of a fragment, for everybody, as SVG: a panel for wire and verb.

Full points are caches with a tensor for each layer, hollow ones blocks across layers.
Both axes are logarithmic: what matters is how many times faster one is than another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2
from statistics import median
from typing import Final
from xml.sax.saxutils import escape

from kvwire.cli.bench.fragments import VERBS, WIRES, Fragments, Row, size_name
from kvwire.cli.bench.turns import Finding

_PANEL_WIDTH: Final = 400
_PANEL_HEIGHT: Final = 280
_LEFT: Final = 46
_TOP: Final = 34
_GAP: Final = 24
_LEGEND_LINE: Final = 16
_LEGEND_COLUMN: Final = 200
_INK: Final = "#1f2933"
_GRID: Final = "#e4e7eb"
# kvwire in blues and bold; others in colours that can be told apart without it.
_OURS: Final = ("#0b6e99", "#2f9e44", "#7048e8", "#1098ad", "#364fc7")
_OTHERS: Final = (
    *("#e8590c", "#c2255c", "#f08c00", "#868e96", "#a61e4d"),
    *("#5c940d", "#845ef7", "#495057", "#d9480f"),
)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Powers of two along both axes."""

    low_size: int
    high_size: int
    low_rate: int
    high_rate: int

    def x(self, size: float) -> float:
        span = max(1, self.high_size - self.low_size)
        inner = _PANEL_WIDTH - _LEFT - _GAP
        return _LEFT + (log2(size) - self.low_size) / span * inner

    def y(self, rate: float) -> float:
        span = self.high_rate - self.low_rate
        inner = _PANEL_HEIGHT - _TOP - _LEFT
        return _PANEL_HEIGHT - _LEFT - (log2(rate) - self.low_rate) / span * inner


def draw(benchmark: Fragments, findings: Sequence[Finding[Row]]) -> str:
    """The picture; panels that would be empty are left out."""
    panels = [
        (wire, verb)
        for wire in WIRES
        for verb in VERBS
        if any(_is_in(f, wire, verb) for f in findings)
    ]
    colors = _colors(benchmark)
    scale = _scale(findings)
    shapes: list[str] = []
    for number, (wire, verb) in enumerate(panels):
        left = number % 2 * _PANEL_WIDTH
        top = number // 2 * _PANEL_HEIGHT
        inside = [f for f in findings if _is_in(f, wire, verb) and f.samples]
        shapes.append(f'<g transform="translate({left} {top})">')
        shapes += _axes(scale, f"{verb}, {wire}", inside)
        shapes += _lines(scale, colors, inside)
        shapes.append("</g>")
    legend_top = -(-len(panels) // 2) * _PANEL_HEIGHT
    shapes += _legend(colors, legend_top)
    width = 2 * _PANEL_WIDTH
    height = legend_top + _legend_rows(colors) * _LEGEND_LINE + _GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" '
        f'fill="{_INK}">'
    )
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    title = "<title>kvwire bench fragments: median rate over fragment size</title>"
    return "\n".join([head, title, background, *shapes, "</svg>\n"])


def _is_in(finding: Finding[Row], wire: str, verb: str) -> bool:
    return finding.case.wire == wire and finding.case.work.verb == verb


def _colors(benchmark: Fragments) -> dict[str, str]:
    names = [contender.name for contender in benchmark.contenders]
    others = [name for name in names if name not in benchmark.ours]
    return {
        **{n: _OURS[i % len(_OURS)] for i, n in enumerate(benchmark.ours)},
        **{n: _OTHERS[i % len(_OTHERS)] for i, n in enumerate(others)},
    }


def _scale(findings: Sequence[Finding[Row]]) -> _Scale:
    """One for all panels, so that they can be compared."""
    sizes = [log2(f.case.work.layer_bytes) for f in findings]
    rates = [log2(median(s.values) / 1e9) for f in findings for s in f.samples.values()]
    low, high = (floor(min(rates)), ceil(max(rates))) if rates else (0, 1)
    return _Scale(floor(min(sizes)), ceil(max(sizes)), low, max(high, low + 1))


def _axes(scale: _Scale, title: str, inside: Sequence[Finding[Row]]) -> Iterator[str]:
    right = _PANEL_WIDTH - _GAP
    yield f'<text x="{_LEFT}" y="20" font-size="13">{escape(title)}, GB/s</text>'
    for power in range(scale.low_rate, scale.high_rate + 1):
        y = scale.y(2.0**power)
        yield f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="{_GRID}"/>'
        yield (
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{2.0**power:g}'
            "</text>"
        )
    for nbytes in sorted({f.case.work.layer_bytes for f in inside}):
        x = scale.x(nbytes)
        below = _PANEL_HEIGHT - _LEFT
        yield f'<path d="M{x:.1f} {_TOP}V{below}" stroke="{_GRID}"/>'
        yield (
            f'<text x="{x:.1f}" y="{below + 16}" text-anchor="middle">'
            f"{size_name(nbytes)}</text>"
        )


def _lines(
    scale: _Scale, colors: Mapping[str, str], inside: Sequence[Finding[Row]]
) -> Iterator[str]:
    for name, color in colors.items():
        for cross_layer in (False, True):
            points = [
                (f.case.work.layer_bytes, median(f.samples[name].values) / 1e9)
                for f in inside
                if f.case.work.cross_layer is cross_layer and name in f.samples
            ]
            places = [(scale.x(size), scale.y(rate)) for size, rate in sorted(points)]
            if not places:
                continue
            width = 2.5 if name.startswith("kvwire") else 1.2
            dash = ' stroke-dasharray="5 4"' if cross_layer else ""
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            yield (
                f'<path d="M{path}" fill="none" stroke="{color}" '
                f'stroke-width="{width}"{dash}/>'
            )
            inside_color = "white" if cross_layer else color
            for x, y in places:
                yield (
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{inside_color}" '
                    f'stroke="{color}"/>'
                )


def _legend(colors: Mapping[str, str], top: int) -> Iterator[str]:
    entries = [(name, color, "") for name, color in colors.items()]
    entries.append(("hollow: blocks across layers", _INK, ' stroke-dasharray="5 4"'))
    rows = _legend_rows(colors)
    for number, (name, color, dash) in enumerate(entries):
        x = _LEFT + number // rows * _LEGEND_COLUMN
        y = top + (number % rows + 1) * _LEGEND_LINE
        width = 2.5 if name.startswith("kvwire") else 1.2
        yield (
            f'<path d="M{x} {y - 4}H{x + 24}" stroke="{color}" '
            f'stroke-width="{width}"{dash}/>'
        )
        yield f'<text x="{x + 30}" y="{y}">{escape(name)}</text>'


def _legend_rows(colors: Mapping[str, str]) -> int:
    columns = (2 * _PANEL_WIDTH - _LEFT) // _LEGEND_COLUMN
    return -(-(len(colors) + 1) // columns)
