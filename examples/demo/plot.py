"""A plot of a run, by matplotlib, which is imported only if one is requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from demo.record import RequestTimes
from demo.show import title
from kvwire.errors import UsageError
from kvwire.extras import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES: Final = (".svg", ".png", ".pdf")
_NOTE: Final = (
    "KV leaves as soon as it is written, before its layer's attention and MLP"
)
# The colour and meaning of each kind of bar.
_LOOKS: Final = {
    "prefill": ("#4c78a8", "computed by prefill"),
    "transfer": ("#f58518", "on its way to decode"),
    "recompute": ("#b279a2", "computed by decode, because it was lost"),
}


def _can_be_written(_type: object, path: Path | None) -> None:
    """Refuse a file that could not be written after the measurement.

    Raises:
        ValueError: matplotlib is missing, or the name's suffix is not a known format.
    """
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise ValueError(f"a plot needs matplotlib: {install_command('plot')}")
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"the file name of a plot must end in {', '.join(_SUFFIXES)}")


Plot = Annotated[Path | None, Parameter(validator=_can_be_written)]
"""An option that names the file of a plot."""


def draw(records: Sequence[RequestTimes]) -> Figure:
    """Draw a panel for each request, in the order they were prefilled."""
    ordered = sorted(records, key=lambda record: record.began)
    figure = new_figure(9.6, 0.9 + 2.0 * len(ordered))
    panels = figure.subplots(len(ordered), sharex=True, squeeze=False)[:, 0]
    for record, axes in zip(ordered, panels, strict=True):
        rows = record.rows
        for bar in record.bars():
            top = rows.index(bar.row) - (0 if bar.kind == "transfer" else 0.4)
            # A bar shorter than a quarter of a millisecond would be invisible.
            length_ms = max(0.25, (bar.stop - bar.start) * 1e3)
            span_ms = ((bar.start - record.began) * 1e3, length_ms)
            axes.broken_barh([span_ms], (top, 0.4), facecolors=_LOOKS[bar.kind][0])
        axes.set_yticks(range(len(rows)), rows, fontsize="small")
        axes.invert_yaxis()
        axes.set_title(title(record), loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(f"ms since the request's prefill began. {_NOTE}")
    add_legend(figure, {label: color for color, label in _LOOKS.values()})
    return figure


def new_figure(width_in: float, height_in: float) -> Figure:
    """Return an empty figure whose parts make room for each other."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - it may be missing

    return Figure(figsize=(width_in, height_in), layout="constrained")


def add_legend(figure: Figure, shades: Mapping[str, str]) -> None:
    """Name each colour, below the figure."""
    from matplotlib.patches import Patch  # noqa: PLC0415 - it may be missing

    figure.legend(
        handles=[Patch(color=shade, label=name) for name, shade in shades.items()],
        loc="outside lower center",
        ncols=len(shades),
        frameon=False,
    )


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the file's suffix.

    Raises:
        UsageError: The file cannot be written.
    """
    from matplotlib import rc_context  # noqa: PLC0415 - it may be missing

    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        # Text stays text, and the same figure gives the same file.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvwire"}):
            figure.savefig(path, metadata=metadata, dpi=150)
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from None
