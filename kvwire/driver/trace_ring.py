"""The last events of one event loop, for ``kvwire trace``: a ring, and nothing else.

There is one only where the configuration says ``inspect``. Who may have something to
note asks whether there is one, and calls nothing otherwise.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import time_ns

from kvwire.driver.limits import TRACE_EVENTS_MAX

# When (ns since 1970), what, of which, and more about it.
TraceEvent = tuple[int, str, str, tuple[str | int, ...]]


class TraceRing:
    """Keeps the last events; the oldest makes room.

    Attributes:
        events: Oldest first.
        users: Communicators of the loop that are inspected.
    """

    __slots__ = ("events", "users")

    def __init__(self) -> None:
        self.events: deque[TraceEvent] = deque(maxlen=TRACE_EVENTS_MAX)
        self.users: int = 0

    def note(self, what: str, key: str, *more: str | int) -> None:
        """Note that something has happened now.

        Args:
            what: One of a few words, such as ``"landed"``.
            key: Which transfer or store call it is of.
            more: What else there is to say; see :mod:`kvwire.observe.trace`.
        """
        self.events.append((time_ns(), what, key, more))


# The ring of each loop that has one: plain, so that to ask it is no call.
RINGS: dict[asyncio.AbstractEventLoop, TraceRing] = {}


def open_ring(loop: asyncio.AbstractEventLoop) -> TraceRing:
    """Return the ring of a loop, once for each communicator that is inspected."""
    ring = RINGS.setdefault(loop, TraceRing())  # bounded: loops, while they are open
    ring.users += 1
    return ring


def close_ring(loop: asyncio.AbstractEventLoop) -> None:
    """Give a ring back; the last one who does ends it."""
    ring = RINGS[loop]
    ring.users -= 1
    if not ring.users:
        del RINGS[loop]
