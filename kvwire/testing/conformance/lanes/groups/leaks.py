"""Nothing is left behind, however often and however badly lanes end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvwire.errors import BackendUnavailable
from kvwire.limits import MIB
from kvwire.testing.conformance.growth import require_no_growth
from kvwire.testing.conformance.lanes.rig import LaneGroup, LaneRig
from kvwire.testing.conformance.shared import leaks as shared

group: LaneGroup = LaneGroup("leak")
group.include(shared.group)

_CYCLES = 20
# Caches may fill once. What is looked for grows with every cycle, or with every fifth.
_TOLERANCE = 3

Cycle = Callable[[LaneRig], Awaitable[None]]


async def _abort_midway(rig: LaneRig) -> None:
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


async def _refused(rig: LaneRig) -> None:
    _left, right = rig.prepare()
    try:
        await right.join(b"no bootstrap")
    except BackendUnavailable:
        await rig.settle()
    right.abort()


_WAYS: dict[str, Cycle] = {
    "closed": shared.exchange_and_close,
    "aborted": _abort_midway,
    "unjoined": _never_join,
    "refused": _refused,
}


@group.each("cycles", "20 lanes that end so leave nothing: {}", _WAYS)
async def _cycles(rig: LaneRig, cycle: Cycle) -> None:
    await require_no_growth(
        lambda: _run(rig, cycle), cycles=_CYCLES, tolerance=_TOLERANCE
    )


async def _run(rig: LaneRig, cycle: Cycle) -> None:
    await cycle(rig)
    for side in rig.sides:
        side.abort()
    await rig.closes(*(side for side in rig.sides if side.begun))
    rig.forget(*rig.sides)
    await rig.settle()
