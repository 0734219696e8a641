"""A benchmark as a picture: a bar for each contender of each case, as SVG.

Written by hand, since a drawing of rectangles needs no library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from xml.sax.saxutils import escape

from kvwire.cli.bench.case import Benchmark, Case
from kvwire.cli.bench.summary import Summary
from kvwire.cli.bench.turns import Finding

WIDTH: Final = 720
# Room for the longest name, of letters that are so wide.
_LEFT: Final = 150
_LETTER: Final = 6
_BAR: Final = 14
_GAP: Final = 6
_TITLE: Final = 34
# Room behind the longest bar for its number.
_NUMBER: Final = 180
_OURS: Final = "#0b6e99"
_OTHERS: Final = ("#9aa5b1", "#bcc5ce", "#d5dbe1")
_INK: Final = "#1f2933"


def draw(benchmark: Benchmark, findings: Sequence[Finding[Case]]) -> str:
    """The picture; each case has a scale of its own, which begins at 0."""
    shapes: list[str] = []
    y = _TITLE
    left = max([_LEFT, *(_LETTER * (len(f.case.name) + 2) for f in findings)])
    for finding in findings:
        shapes.extend(_case(finding, y, left))
        y += len(finding.samples) * _BAR + 2 * _GAP
    title = escape(f"kvwire bench {benchmark.name}: medians, whiskers from min to p99")
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
        f'viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="11" '
        f'fill="{_INK}">'
    )
    return "\n".join(
        [
            head,
            f"<title>{title}</title>",
            f'<rect width="{WIDTH}" height="{y}" fill="white"/>',
            f'<text x="8" y="20" font-size="14">{title}</text>',
            *shapes,
            "</svg>\n",
        ]
    )


def _case(finding: Finding[Case], top: int, left: int) -> Iterator[str]:
    case = finding.case
    summaries = {
        name: Summary.of(samples.values) for name, samples in finding.samples.items()
    }
    longest = max(max(s.median, s.p99) for s in summaries.values())
    scale = (WIDTH - left - _NUMBER) / longest
    yield f'<text x="8" y="{top + _BAR - 3}">{escape(case.name)}</text>'
    for number, (name, summary) in enumerate(summaries.items()):
        y = top + number * _BAR
        color = _OURS if name == case.ours.name else _OTHERS[number % len(_OTHERS)]
        end = left + summary.median * scale
        yield (
            f'<rect x="{left}" y="{y}" width="{end - left:.1f}" '
            f'height="{_BAR - 2}" fill="{color}"/>'
        )
        low, high = (left + value * scale for value in (summary.low, summary.p99))
        middle = y + _BAR / 2 - 1
        yield (
            f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="{_INK}" '
            f'stroke-width="1"/>'
        )
        shown = f"{summary.median * case.unit.scale:.2f} {case.unit.name} {name}"
        x = max(end, high) + 4
        yield f'<text x="{x:.1f}" y="{y + _BAR - 3}">{escape(shown)}</text>'
