"""The last events of one event loop, for ``kvwire trace``.

There is a ring only if the configuration sets ``inspect``. Code that reports an event
first checks whether there is a ring.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import time_ns
from typing import Final

# The events of a process that `kvwire trace` can show: those of 400 transfers of 32
# layers, in 4 MB.
TRACE_EVENTS_MAX: Final = 16_384

# Time (ns since 1970), event, its transfer or call, and further values.
TraceEvent = tuple[int, str, str, tuple[str | int, ...]]


class TraceRing:
    """Keeps the last events; a new event replaces the oldest.

    Attributes:
        events: Oldest first.
        users: The number of inspected communicators on the loop.
    """

    __slots__ = ("events", "users")

    def __init__(self) -> None:
        self.events: deque[TraceEvent] = deque(maxlen=TRACE_EVENTS_MAX)
        self.users: int = 0

    def note(self, what: str, key: str, *more: str | int) -> None:
        """Record an event with the current time.

        Args:
            what: The event's name, such as ``"landed"``.
            key: The transfer or store call that it belongs to.
            more: Further values; see :mod:`kvwire.observe.trace`.
        """
        self.events.append((time_ns(), what, key, more))


# The loops' rings, in a plain dict, so that a look-up needs no call.
RINGS: dict[asyncio.AbstractEventLoop, TraceRing] = {}


def open_ring(loop: asyncio.AbstractEventLoop) -> TraceRing:
    """Return a loop's ring; call once for each inspected communicator."""
    ring = RINGS.setdefault(loop, TraceRing())  # bounded: loops, while they are open
    ring.users += 1
    return ring


def close_ring(loop: asyncio.AbstractEventLoop) -> None:
    """Release a ring; the last release removes it."""
    ring = RINGS[loop]
    ring.users -= 1
    if not ring.users:
        del RINGS[loop]
