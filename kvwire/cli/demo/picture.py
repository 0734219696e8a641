"""The picture of a run, drawn by matplotlib.

It is imported when a picture is asked for: nothing else of the command needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from kvwire.cli.demo.record import RequestTimes
from kvwire.cli.demo.show import title
from kvwire.errors import UsageError
from kvwire.extras import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES: Final = (".svg", ".png", ".pdf")
_NOTE: Final = (
    "KV leaves as soon as it is written, before its layer's attention and MLP"
)
# Of each kind of bars, and what it means.
_LOOKS: Final = {
    "prefill": ("#4c78a8", "computed by prefill"),
    "transfer": ("#f58518", "on its way to decode"),
    "recompute": ("#b279a2", "computed by decode, because it was lost"),
}


def _can_be_written(_type: object, path: Path | None) -> None:
    """Refuse what would fail after the run, before it.

    Raises:
        ValueError: matplotlib is missing, or the name says no known format.
    """
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise ValueError(f"a picture needs matplotlib: {install_command('plot')}")
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"the name of a picture ends in {', '.join(_SUFFIXES)}")


Plot = Annotated[Path | None, Parameter(validator=_can_be_written)]
"""An option that names the file of a picture."""


def draw(records: Sequence[RequestTimes]) -> Figure:
    """Draw a panel for each request, in the order they were prefilled."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - it may be missing
    from matplotlib.patches import Patch  # noqa: PLC0415 - it may be missing

    ordered = sorted(records, key=lambda record: record.began)
    figure = Figure(figsize=(9.6, 0.9 + 2.0 * len(ordered)), layout="constrained")
    panels = figure.subplots(len(ordered), sharex=True, squeeze=False)[:, 0]
    for record, axes in zip(ordered, panels, strict=True):
        rows = record.rows
        for bar in record.bars():
            top = rows.index(bar.row) - (0 if bar.kind == "transfer" else 0.4)
            # Thinner than a quarter of a millisecond is not seen.
            length_ms = max(0.25, (bar.stop - bar.start) * 1e3)
            span_ms = ((bar.start - record.began) * 1e3, length_ms)
            axes.broken_barh([span_ms], (top, 0.4), facecolors=_LOOKS[bar.kind][0])
        axes.set_yticks(range(len(rows)), rows, fontsize="small")
        axes.invert_yaxis()
        axes.set_title(title(record), loc="left", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(f"ms since the request's prefill began. {_NOTE}")
    figure.legend(
        handles=[Patch(color=shade, label=name) for shade, name in _LOOKS.values()],
        loc="outside lower center",
        ncols=len(_LOOKS),
        frameon=False,
    )
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format that the file's name says.

    Raises:
        UsageError: The file cannot be written.
    """
    from matplotlib import rc_context  # noqa: PLC0415 - it may be missing

    metadata = {"Date": None} if path.suffix == ".svg" else None
    try:
        # Text stays text, and the same figures are the same file.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvwire"}):
            figure.savefig(path, metadata=metadata, dpi=150)
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from None
