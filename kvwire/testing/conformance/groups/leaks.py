"""Nothing is left behind, however often and however badly links end.

Every check looks for descriptors, tasks and errors that it left. These repeat what
might leave a little each time, and look for what only shows in numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from kvwire.limits import MIB
from kvwire.testing.conformance.growth import require_no_growth
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.testing.conformance.shared import leaks as shared

group: Group = Group("leak")
group.include(shared.group)

_CYCLES = 30
# Caches may fill once. What is looked for grows with every cycle, or with every fifth.
_TOLERANCE = 4

Cycle = Callable[[Rig], Awaitable[None]]


async def _abort_midway(rig: Rig) -> None:
    left, right = await rig.pair()
    left.send_many(4, MIB)
    right.abort()
    await rig.closes(left, right)


async def _never_start(rig: Rig) -> None:
    left, right = await rig.pair(start_left=False, start_right=False)
    left.abort()
    right.close()


async def _listen_and_close(rig: Rig) -> None:
    await (await rig.listen()).close()


async def _refused(rig: Rig) -> None:
    listener = await rig.listen()
    await listener.close()
    try:
        link = await rig.near.connect(listener.address)
    except OSError:
        return
    link.abort()


async def _unaccepted(rig: Rig) -> None:
    listener = await rig.listen(accept=lambda link: link.abort())
    # The link may be aborted before the connect that made it has returned.
    with contextlib.suppress(OSError):
        await rig.connect(listener.address)
    await rig.settle()
    rig.abort_all()
    await listener.close()


_WAYS: dict[str, Cycle] = {
    "closed": shared.exchange_and_close,
    "aborted": _abort_midway,
    "unstarted": _never_start,
    "listened": _listen_and_close,
    "refused": _refused,
    "unwanted": _unaccepted,
}


@group.each("cycles", "30 links that end so leave nothing: {}", _WAYS)
async def _cycles(rig: Rig, cycle: Cycle) -> None:
    await require_no_growth(
        lambda: _run(rig, cycle), cycles=_CYCLES, tolerance=_TOLERANCE
    )


async def _run(rig: Rig, cycle: Cycle) -> None:
    await cycle(rig)
    await rig.settle()
