"""The timeline as SVG: a panel for each request, a row for each layer.

All panels have one scale; each begins with its own prefill. In a row, compute is above
and the transfer below; it begins where the layer's keys and values are written, so
before its attention and its MLP are through.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final
from xml.sax.saxutils import escape

from examples.demo.record import Record

WIDTH: Final = 960
_LEFT: Final = 64
_RIGHT: Final = 24
_ROW: Final = 13
_HEADER: Final = 30
_GAP: Final = 14
_TOP: Final = 52

COMPUTE: Final = "#4c78a8"
TRANSFER: Final = "#f58518"
RECOMPUTE: Final = "#b279a2"
# Thinner than this is not seen.
_BAR_WIDTH_MIN: Final = 1.5


def picture(records: Sequence[Record]) -> str:
    """The whole picture, of requests in the order they were prefilled."""
    ordered = sorted(records, key=lambda record: record.began)
    longest_s = max(_end(record) - record.began for record in ordered)
    scale = (WIDTH - _LEFT - _RIGHT) / longest_s
    parts: list[str] = [*_legend()]
    top = _TOP
    for record in ordered:
        parts += _panel(record, top, scale)
        top += _HEADER + _ROW * len(record.marked) + _GAP
    parts += _axis(longest_s, scale, top)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 40}" '
        f'font-family="sans-serif" font-size="12" fill="#222">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _end(record: Record) -> float:
    return max(
        record.arrived.at,
        record.spans[-1].stop,
        *(span.stop for span in record.recomputed),
    )


def _legend() -> Iterator[str]:
    yield _text(_LEFT, 22, "Prefill computes, kvwire moves: layer by layer", size=15)
    entries = (
        (COMPUTE, "computed by prefill"),
        (TRANSFER, "on its way to decode"),
        (RECOMPUTE, "lost, computed by decode"),
    )
    for index, (color, label) in enumerate(entries):
        x = _LEFT + index * 170
        yield f'<rect x="{x}" y="32" width="12" height="10" fill="{color}"/>'
        yield _text(x + 18, 41, label)


def _panel(record: Record, top: int, scale: float) -> Iterator[str]:
    yield _text(_LEFT, top + 20, _title(record))
    rows = top + _HEADER

    def bar(layer: int, start: float, stop: float, color: str) -> str:
        below = _ROW // 2 if color == TRANSFER else 0
        x = _LEFT + (start - record.began) * scale
        width = max(_BAR_WIDTH_MIN, (stop - start) * scale)
        y = rows + layer * _ROW + 1 + below
        label = f"layer {layer}: {(stop - start) * 1e3:.2f} ms"
        return (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW // 2}" '
            f'fill="{color}"><title>{label}</title></rect>'
        )

    for layer in range(len(record.marked)):
        if layer % 2 == 0:
            y = rows + layer * _ROW
            yield (
                f'<rect x="{_LEFT}" y="{y}" width="{WIDTH - _LEFT - _RIGHT}" '
                f'height="{_ROW}" fill="#f4f4f4"/>'
            )
            yield _text(_LEFT - 6, y + _ROW - 3, f"layer {layer}", size=9, end=True)
    for span in record.spans:
        yield bar(span.layer, span.start, span.stop, COMPUTE)
    for layer, landed in record.landed.items():
        yield bar(layer, record.marked[layer], landed, TRANSFER)
    for span in record.recomputed:
        yield bar(span.layer, span.start, span.stop, RECOMPUTE)


def _title(record: Record) -> str:
    arrived = record.arrived
    title = f"{record.request}: {arrived.tokens} tokens, {arrived.nbytes / 1e6:.1f} MB"
    if not arrived.missing:
        return f"{title}, exposed after the last layer {record.exposed_s * 1e3:.2f} ms"
    ranges = ", ".join(f"{start} to {stop - 1}" for start, stop in arrived.to_prefill)
    lost = f"{len(arrived.missing)} of {arrived.blocks} blocks lost on purpose"
    return f"{title}, {lost}, tokens {ranges} computed by decode"


def _axis(longest_s: float, scale: float, top: int) -> Iterator[str]:
    step_s = _round_step(longest_s / 8)
    for index in range(int(longest_s / step_s) + 1):
        x = _LEFT + index * step_s * scale
        yield (
            f'<line x1="{x:.2f}" y1="{_TOP}" x2="{x:.2f}" y2="{top}" '
            f'stroke="#ccc" stroke-width="0.5"/>'
        )
        yield _text(x, top + 14, f"{index * step_s * 1e3:g} ms", size=10)
    yield _text(_LEFT, top + 30, "since the request's prefill began", size=10)


def _round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, ... times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= step)


def _text(x: float, y: float, text: str, *, size: int = 12, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}"{anchor}>{escape(text)}</text>'
