"""The consoles that commands print on."""

from __future__ import annotations

import os
from typing import Final

from rich.console import Console, RenderableType

# The width of a table in a file or a pipe: unlimited.
_PIPED_COLUMNS: Final = 10_000


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
