"""What ``kvwire bench overlap`` found: as a table, as JSON, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any, Final

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
from kvwire.cli.plot import colors, new_figure
from kvwire.limits import KIB, MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

_CURVES: Final[tuple[tuple[str, Callable[[Setting], float]], ...]] = (
    ("sent whole", lambda s: median(s.whole_s)),
    ("streamed", lambda s: median(s.streamed_s)),
    ("what no schedule can hide", lambda s: s.ideal_s),
)


def draw(found: Overlap) -> dict[str, Figure]:
    """Draw exposed time over the number of layers, where compute is longer.

    Returns:
        The picture, by what is added to the name of the file: nothing.
    """
    # Of each number of layers two are judged: compute is longer, or shorter.
    by_compute = sorted(
        (s for s in found.settings if s.judged), key=lambda s: s.compute_s
    )
    settings = {s.layers: s for s in by_compute}
    layers = sorted(settings)
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    axes.set_title("kvwire bench overlap: ms exposed after the last mark", loc="left")
    shades = colors([name for name, _ in _CURVES])
    for name, value in _CURVES:
        times_ms = [value(settings[count]) * 1e3 for count in layers]
        axes.plot(layers, times_ms, "o-", color=shades[name], label=name)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xticks(layers, [f"{n} layers" for n in layers])
    axes.grid(axis="y", color="0.9")
    axes.legend(frameon=False)
    return {"": figure}
