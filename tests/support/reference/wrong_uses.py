"""docs/reference/wrong-uses.md: what is said to whoever uses kvwire wrongly."""

from __future__ import annotations

from typing import Final

from tests.support.reference.words import table
from tests.support.wrong_uses import SECTIONS

_INTRODUCTION: Final = """\
# Wrong uses

Written from a table of tests by `make reference`: each row is done, ends at once, and
says these words among others. `conn` is a connection of the communicator `comm`, `back`
its other end; `out` and `inc` are the two ends of a transfer. An `Outcome` is no
exception: the transfer ends with it, and the words are its reason.
"""


def page() -> str:
    parts = [_INTRODUCTION]
    for title, rows in SECTIONS.items():
        lines = [
            (_cell(row.name), f"`{row.error.__name__}`", _cell(row.words))
            for row in rows
        ]
        heading = ("what is done", "error", "what is said, among others")
        parts.append(f"## {title}\n\n{table(heading, lines)}\n")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
