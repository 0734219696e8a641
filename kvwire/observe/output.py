"""The output of commands."""

from __future__ import annotations

import io
import os
import sys
from typing import Final

# Less than this has no room for a table of options; terminals without a size have 0.
_COLUMNS_MIN: Final = 20
# Panels of help are drawn as wide as they may be, so 1e9 columns never end.
_COLUMNS_DIGITS_MAX: Final = 4


def prepare_output() -> None:
    """Let the output take every character, on lines of a printable width."""
    columns = os.environ.get("COLUMNS", "")
    fits = columns.isdecimal() and len(columns) <= _COLUMNS_DIGITS_MAX
    if not fits or int(columns) < _COLUMNS_MIN:
        os.environ.pop("COLUMNS", None)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, as by `>&-`
            unread = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(unread, "w", closefd=False))
    # A name may have a character that the locale's encoding has not.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
