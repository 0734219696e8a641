"""The output of commands, and the consoles that they print on."""

from __future__ import annotations

import io
import os
import sys
from typing import Final

from rich.console import Console, RenderableType

# The width of a table in a file or a pipe: unlimited.
_PIPED_COLUMNS: Final = 10_000
# A table of options needs at least this width; a terminal without a size has 0.
_COLUMNS_MIN: Final = 20
# Help is drawn at full width, which would take for ever with 1e9 columns.
_COLUMNS_DIGITS_MAX: Final = 4


def prepare_output() -> None:
    """Let the output accept every character, on lines of a printable width."""
    columns = os.environ.get("COLUMNS", "")
    fits = columns.isdecimal() and len(columns) <= _COLUMNS_DIGITS_MAX
    if not fits or int(columns) < _COLUMNS_MIN:
        os.environ.pop("COLUMNS", None)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, for example by `>&-`
            unread = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(unread, "w", closefd=False))
    # A name may contain a character that the locale's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def console(*, stderr: bool = False) -> Console:
    """Return a console that wraps lines for a terminal, and never for a pipe or a file.

    ``COLUMNS`` in the environment sets the width in each case.
    """
    made = Console(stderr=stderr, highlight=False, markup=False)
    if not made.file.isatty() and "COLUMNS" not in os.environ:
        made.width = _PIPED_COLUMNS
    return made


def show(renderable: RenderableType, on: Console) -> None:
    """Print a table or a screen; in a pipe, without blanks at the ends of lines."""
    if on.width != _PIPED_COLUMNS:
        on.print(renderable)
        return
    with on.capture() as shown:
        on.print(renderable)
    for line in shown.get().splitlines():
        on.file.write(f"{line.rstrip()}\n")
