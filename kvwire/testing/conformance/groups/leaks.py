"""Nothing is left behind, however often and however badly links end.

Every check looks for descriptors, tasks and errors that it left. These repeat what
might leave a little each time, and look for what only shows in numbers.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Awaitable, Callable

from kvwire.errors import BackendUnavailable
from kvwire.limits import MIB
from kvwire.testing.conformance.bench import require_collected, require_no_growth
from kvwire.testing.conformance.check import GroupOf
from kvwire.testing.conformance.rig import AnyRig, Group, LaneGroup, LaneRig, Rig

links, lanes = Group("leak"), LaneGroup("leak")
both: GroupOf[AnyRig] = GroupOf("leak", links, lanes)


async def exchange_and_close(rig: AnyRig) -> None:
    """Move one payload, and end cleanly.

    Cancel safety: not cancel safe; it may stay open.
    """
    left, right = await rig.pair()
    left.send(100_000)
    await rig.arrives(right, 1)
    left.close()
    right.close()
    await rig.closes(left, right)


@both.check("collected", "What has ended is collected, and so is its handler")
async def _collected(rig: AnyRig) -> None:
    await rig.pair()
    await exchange_and_close(rig)
    left, right = rig.sides[-2:]
    await rig.settle()
    alive = [weakref.ref(side) for side in (left, right)]
    rig.forget(left, right)
    del left, right
    await rig.settle()
    require_collected(alive, "handlers")


# --- of links alone -------------------------------------------------------------------


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
    "closed": exchange_and_close,
    "aborted": _abort_midway,
    "unstarted": _never_start,
    "listened": _listen_and_close,
    "refused": _refused,
    "unwanted": _unaccepted,
}


@links.each("cycles", "30 links that end so leave nothing: {}", _WAYS)
async def _cycles(rig: Rig, cycle: Cycle) -> None:
    await require_no_growth(
        lambda: _run(rig, cycle), cycles=_CYCLES, tolerance=_TOLERANCE
    )


async def _run(rig: Rig, cycle: Cycle) -> None:
    await cycle(rig)
    await rig.settle()


# --- of lanes alone -------------------------------------------------------------------


_CYCLES_lanes = 20
# Caches may fill once. What is looked for grows with every cycle, or with every fifth.
_TOLERANCE_lanes = 3

Cycle_lanes = Callable[[LaneRig], Awaitable[None]]


async def _abort_midway_lanes(rig: LaneRig) -> None:
    left, right = await rig.pair()
    left.send_many(8, MIB)
    right.abort()
    left.abort()
    await rig.closes(left, right)


async def _never_join(rig: LaneRig) -> None:
    left, right = rig.prepare()
    left.abort()
    right.abort()
    await rig.settle()


async def _refused_lanes(rig: LaneRig) -> None:
    _left, right = rig.prepare()
    try:
        await right.join(b"no bootstrap")
    except BackendUnavailable:
        await rig.settle()
    right.abort()


_WAYS_lanes: dict[str, Cycle_lanes] = {
    "closed": exchange_and_close,
    "aborted": _abort_midway_lanes,
    "unjoined": _never_join,
    "refused": _refused_lanes,
}


@lanes.each("cycles", "20 lanes that end so leave nothing: {}", _WAYS_lanes)
async def _cycles_lanes(rig: LaneRig, cycle: Cycle_lanes) -> None:
    await require_no_growth(
        lambda: _run_lanes(rig, cycle), cycles=_CYCLES_lanes, tolerance=_TOLERANCE_lanes
    )


async def _run_lanes(rig: LaneRig, cycle: Cycle_lanes) -> None:
    await cycle(rig)
    for side in rig.sides:
        side.abort()
    await rig.closes(*(side for side in rig.sides if side.begun))
    rig.forget(*rig.sides)
    await rig.settle()
