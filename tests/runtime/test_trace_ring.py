"""The last events of a loop: bounded, and there only while somebody may look."""

from __future__ import annotations

import asyncio

from kvwire.runtime.trace_ring import RINGS, TRACE_EVENTS_MAX, close_ring, open_ring


async def test_the_oldest_makes_room() -> None:
    loop = asyncio.get_running_loop()
    ring = open_ring(loop)
    assert open_ring(loop) is ring
    for number in range(TRACE_EVENTS_MAX + 2):
        ring.note("landed", "key", number)
    assert len(ring.events) == TRACE_EVENTS_MAX
    assert ring.events[0][1:] == ("landed", "key", (2,))
    close_ring(loop)
    assert RINGS[loop] is ring
    close_ring(loop)
    assert loop not in RINGS
