"""Which inputs reach what: the smallest few that reach together what all of them do.

libFuzzer can do this itself, but only where it can start the fuzzer anew by its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, Final

from tests.fuzz.guard import Run

Edge = tuple[str, int, int]
"""A file, and two lines of it that were run one after the other."""

_CORE: Final = (
    *(
        "kvwire/wire/",
        "kvwire/proto/",
        "kvwire/region.py",
        "kvwire/transfers/description.py",
    ),
    *(
        "kvwire/kv/",
        "kvwire/transfers/receiver.py",
        "kvwire/store/server/messages.py",
        "backends/",
    ),
)


def edges(run: Run, data: bytes) -> set[Edge]:
    """What an input reaches in the core."""
    found: set[Edge] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if event != "call" or not any(part in name for part in _CORE):
            return None
        last = frame.f_lineno

        def lines(inner: FrameType, what: str, _: Any) -> Any:
            nonlocal last
            if what == "line":
                found.add((name, last, inner.f_lineno))
                last = inner.f_lineno
            return lines

        return lines

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run(data)
    finally:
        sys.settrace(before)
    return found


def smallest(run: Run, kept: Iterable[bytes], found: Iterable[bytes]) -> list[bytes]:
    """Those of ``found``, shortest first, that reach what nothing before them does."""
    reached: set[Edge] = set()
    for data in kept:
        reached |= edges(run, data)
    chosen = []
    for data in sorted(set(found), key=lambda data: (len(data), data)):
        fresh = edges(run, data) - reached
        if fresh:
            reached |= fresh
            chosen.append(data)
    return chosen
