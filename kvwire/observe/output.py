"""The output of commands."""

from __future__ import annotations

import io
import os
import sys


def prepare_output() -> None:
    """Make the output take whatever is printed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, as by `>&-`
            unread = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(unread, "w", closefd=False))
    # A name may have a character that the locale's encoding has not.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
