"""What ``kvwire bench overlap`` found: as a table, as JSON, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from math import ceil, floor, log10
from statistics import median
from typing import Any, Final
from xml.sax.saxutils import escape

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import kvwire
from kvwire.cli.bench.document import machine
from kvwire.cli.bench.overlap import (
    BULK_TARGET,
    CONTROL_LAYERS,
    CONTROL_TARGET_S,
    EFFICIENCY_TARGET,
    SLACK_S,
    Bulk,
    Control,
    Overlap,
    Setting,
)
from kvwire.cli.bench.table import MET, MISSED
from kvwire.limits import KIB, MIB

WIDTH: Final = 720
HEIGHT: Final = 360
_MARGIN: Final = 60
_INK: Final = "#1f2933"
_GRID: Final = "#d5dbe1"


# --- the table ------------------------------------------------------------------------


def render(found: Overlap) -> RenderableType:
    """A table of what stays exposed, and the lines below it."""
    judged = [setting for setting in found.settings if setting.judged]
    lines = [
        _target_line(),
        "",
        *map(_short_line, (s for s in found.settings if not s.judged)),
        *map(_bulk_line, found.bulk),
        _control_line(found.control),
    ]
    return Group(_exposed(judged), *(Text.from_markup(line) for line in lines))


def _exposed(settings: Sequence[Setting]) -> Table:
    table = Table(
        title="kvwire bench overlap: exposed after the last mark, medians in ms",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for name in ("layers", "compute", "one layer", "whole", "streamed", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("targets", no_wrap=True)
    for setting in settings:
        table.add_row(
            str(setting.layers),
            _ms(setting.compute_s),
            _ms(median(setting.layer_s)),
            _ms(median(setting.whole_s)),
            _ms(median(setting.streamed_s)),
            f"{setting.efficiency:.3f}",
            MET if setting.met else MISSED,
        )
    return table


def _target_line() -> str:
    return (
        f"Targets: streamed <= what no schedule can hide + {SLACK_S * 1e3:g} ms, "
        f"efficiency >= {EFFICIENCY_TARGET}."
    )


def _short_line(setting: Setting) -> str:
    gain_s = setting.gain_s
    what = "saves" if gain_s > 0 else "costs"
    cpu = [median(cpu_s) for cpu_s in (setting.streamed_cpu_s, setting.whole_cpu_s)]
    return (
        f"A short prompt ({setting.layers} layers of {_size(setting.layer_bytes)}, "
        f"{_ms(setting.compute_s)} ms each): streaming {what} {_ms(abs(gain_s))} ms "
        f"of {_ms(median(setting.whole_s))} ms, CPU {_ms(cpu[0])} beside "
        f"{_ms(cpu[1])} ms."
    )


def _bulk_line(bulk: Bulk) -> str:
    return (
        f"Nothing computed, {bulk.layers} layers of {_size(bulk.layer_bytes)}: "
        f"by layer {_ms(median(bulk.by_layer_s))} ms, "
        f"at once {_ms(median(bulk.at_once_s))} ms, ratio {bulk.ratio:.3f}, "
        f"target <= {BULK_TARGET}: "
        f"{_verdict(bulk.ratio <= BULK_TARGET)}"
    )


def _control_line(control: Control) -> str:
    return (
        f"Control work, CPU of both sides: {CONTROL_LAYERS} tiny layers add "
        f"{_ms(control.added_s)} ms to a transfer of one "
        f"({_ms(median(control.one_s))} ms), target <= {CONTROL_TARGET_S * 1e3:g} ms: "
        f"{_verdict(control.added_s <= CONTROL_TARGET_S)}. Each sent by itself they "
        f"add {_ms(control.added_apart_s)} ms."
    )


def _verdict(met: bool) -> str:
    verdict = MET if met else MISSED
    return f"[{verdict.style}]{verdict.plain}[/]"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


# --- the document ---------------------------------------------------------------------


def document(found: Overlap, settings: dict[str, Any]) -> dict[str, Any]:
    """Everything measured, and on what; times are seconds.

    Args:
        found: What was found.
        settings: How the command was called.
    """
    return {
        "benchmark": "overlap",
        "kvwire": kvwire.__version__,
        "settings": settings,
        "machine": machine(),
        "facts": found.facts,
        "exposed": [
            {
                **asdict(setting),
                "ideal_s": setting.ideal_s,
                "efficiency": setting.efficiency,
                "met": setting.met if setting.judged else None,
            }
            for setting in found.settings
        ],
        "bulk": [
            {**asdict(bulk), "ratio": bulk.ratio, "met": bulk.ratio <= BULK_TARGET}
            for bulk in found.bulk
        ],
        "control": {
            **asdict(found.control),
            "added_s": found.control.added_s,
            "added_apart_s": found.control.added_apart_s,
            "met": found.control.added_s <= CONTROL_TARGET_S,
        },
    }


# --- the picture ----------------------------------------------------------------------

_CURVES: Final[tuple[tuple[str, str, Callable[[Setting], float]], ...]] = (
    ("sent whole", "#9aa5b1", lambda s: median(s.whole_s)),
    ("streamed", "#0b6e99", lambda s: median(s.streamed_s)),
    ("what no schedule can hide", "#bcc5ce", lambda s: s.ideal_s),
)


def draw(found: Overlap) -> str:
    """Exposed time over the number of layers, where compute is longer, as SVG."""
    longest = max(s.compute_s / median(s.layer_s) for s in found.settings if s.judged)
    settings = [
        s
        for s in found.settings
        if s.judged and s.compute_s / median(s.layer_s) > longest / 2
    ]
    times = [value(s) * 1e3 for s in settings for _, _, value in _CURVES]
    low, high = floor(log10(min(times))), ceil(log10(max(times)))
    widest = max(s.layers for s in settings)

    def at(layers: int, seconds: float) -> tuple[float, float]:
        x = _MARGIN + (WIDTH - 4 * _MARGIN) * layers / widest
        share = (log10(seconds * 1e3) - low) / max(1, high - low)
        return x, HEIGHT - _MARGIN - (HEIGHT - 2 * _MARGIN) * share

    title = "kvwire bench overlap: ms exposed after the last mark"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11" '
        f'fill="{_INK}">'
    )
    shapes = [
        head,
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{title}</text>',
        *_grid(range(low, high + 1), at),
        *(
            f'<text x="{at(s.layers, 1.0)[0]:.1f}" y="{HEIGHT - _MARGIN + 18}" '
            f'text-anchor="middle">{s.layers} layers</text>'
            for s in settings
        ),
    ]
    for name, color, value in _CURVES:
        points = [at(s.layers, value(s)) for s in settings]
        shapes.extend(_curve(name, color, points))
    return "\n".join([*shapes, "</svg>\n"])


def _grid(
    decades: range, at: Callable[[int, float], tuple[float, float]]
) -> Iterator[str]:
    for decade in decades:
        _, y = at(0, 10**decade / 1e3)
        yield (
            f'<path d="M{_MARGIN} {y:.1f}H{WIDTH - 3 * _MARGIN}" stroke="{_GRID}"/>'
            f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{10.0**decade:g}</text>"
        )


def _curve(name: str, color: str, points: list[tuple[float, float]]) -> Iterator[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield (f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
    for x, y in points:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>'
    x, y = points[-1]
    yield f'<text x="{x + 8:.1f}" y="{y + 4:.1f}">{escape(name)}</text>'
