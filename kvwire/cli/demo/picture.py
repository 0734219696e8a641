"""The timelines as a picture: a panel for each request, a row for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvwire.cli.demo.record import RequestTimes
from kvwire.cli.demo.report import title
from kvwire.cli.plot import add_legend, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS: Final = {"compute": "#4c78a8", "transfer": "#f58518", "recompute": "#b279a2"}
_LABELS: Final = {
    "compute": "computed by prefill",
    "transfer": "on its way to decode",
    "recompute": "computed by decode, because it was lost",
}
_NOTE: Final = (
    "KV leaves as soon as it is written, before its layer's attention and MLP"
)


def draw(records: Sequence[RequestTimes]) -> Figure:
    """Draw all requests in the order they were prefilled."""
    ordered = sorted(records, key=lambda record: record.began)
    figure = new_figure(9.6, 0.9 + 2.0 * len(ordered))
    panels = figure.subplots(len(ordered), sharex=True, squeeze=False)[:, 0]
    for record, axes in zip(ordered, panels, strict=True):
        _panel(axes, record)
    panels[-1].set_xlabel(f"ms since the request's prefill began. {_NOTE}")
    add_legend(figure, {_LABELS[kind]: color for kind, color in COLORS.items()})
    return figure


def _panel(axes: Axes, record: RequestTimes) -> None:
    for bar in record.bars():
        below = 0.4 if bar.kind == "transfer" else 0
        start_ms = (bar.start - record.began) * 1e3
        # Thinner than a quarter of a millisecond is not seen.
        length_ms = max(0.25, (bar.stop - bar.start) * 1e3)
        axes.broken_barh(
            [(start_ms, length_ms)],
            (bar.row - 0.4 + below, 0.4),
            facecolors=COLORS[bar.kind],
        )
    axes.set_yticks(range(len(record.rows)), record.rows, fontsize="small")
    axes.invert_yaxis()
    axes.set_title(title(record), loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
