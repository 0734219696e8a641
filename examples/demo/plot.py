"""Pictures, drawn by matplotlib, which is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from kvwire.errors import UsageError
from kvwire.extras import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES: Final = (".svg", ".png", ".pdf")


def _can_be_written(_type: object, path: Path | None) -> None:
    """Refuse what would fail after the measurement, before it.

    Raises:
        ValueError: matplotlib is missing, or the name says no known format.
    """
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise ValueError(_needs_matplotlib())
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"the name of a picture ends in {', '.join(_SUFFIXES)}")


Plot = Annotated[Path | None, Parameter(validator=_can_be_written)]
"""An option that names the file of a picture."""


def new_figure(width_in: float, height_in: float) -> Figure:
    """Make an empty figure whose parts make room for each other.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - it may be missing
    except ModuleNotFoundError:
        raise UsageError(_needs_matplotlib()) from None
    return Figure(figsize=(width_in, height_in), layout="constrained")


def _needs_matplotlib() -> str:
    return f"a picture needs matplotlib: {install_command('plot')}"


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
