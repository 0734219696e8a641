"""``--log-level``: which log records a command writes to its standard error."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvwire.config import LOG_LEVEL_VARIABLE
from kvwire.errors import UsageError, nearest

OPTION: Final = "--log-level"
LEVELS: Final = ("debug", "info", "warning", "error")
HELP: Final = (
    f"Every command takes {OPTION} {'|'.join(LEVELS)}, or the variable "
    f"{LOG_LEVEL_VARIABLE}: the lowest level that it logs to standard error. "
    f"The default is warning."
)
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def take_level(tokens: list[str]) -> tuple[list[str], str]:
    """Return a command line without the option, and the option's level.

    The option may stand anywhere before ``--``. The last one counts.
    """
    level = os.environ.get(LOG_LEVEL_VARIABLE) or "warning"
    source = LOG_LEVEL_VARIABLE
    left: list[str] = []
    rest = iter(tokens)
    for word in rest:
        name, equals, value = word.partition("=")
        if word == "--":
            left += [word, *rest]
        elif name == OPTION:
            source = OPTION
            level = value if equals else next(rest, "")
        else:
            left.append(word)
    if level.lower() not in LEVELS:
        raise UsageError(f"{source}={level}: {nearest(level, LEVELS)}")
    return left, level.lower()


@contextmanager
def logging_from(level: str) -> Iterator[None]:
    """Write kvwire's log records from this level up, and others' warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    # A logger that lets a record through has decided about its level; none is set here.
    everybody = logging.getLogger()
    own = logging.getLogger("kvwire")
    before = own.level
    everybody.addHandler(handler)
    own.setLevel(level.upper())
    try:
        yield
    finally:
        own.setLevel(before)
        everybody.removeHandler(handler)
