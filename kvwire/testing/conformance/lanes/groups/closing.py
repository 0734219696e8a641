"""close: what is queued still moves, and then the lane ends cleanly."""

from __future__ import annotations

from kvwire.limits import MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.lanes.rig import LaneGroup, LaneRig
from kvwire.testing.conformance.lanes.side import LaneSide
from kvwire.testing.conformance.shared import closing as shared

group: LaneGroup = LaneGroup("close")
group.include(shared.group)


@group.pair("receiving", "close lets arrivals that were queued come in")
async def _receiving(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.send_many(12, MIB)
    right.close()
    await rig.arrives(right, 12)
    await rig.end(right)


@group.pair("both", "Both sides close at once, with payloads under way both ways")
async def _both(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for _ in range(12):
        left.send(MIB)
        right.send(MIB)
    left.close()
    right.close()
    await rig.arrives(right, 12)
    await rig.arrives(left, 12)
    await rig.end(left, right)


@group.pair("then-abort", "abort after close ends the lane at once")
async def _then_abort(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.holding = True
    left.send_many(32, MIB)
    left.close()
    left.abort()
    await rig.closes(left)
    require(left.closed == [None], f"lane_closed was told {left.closed[0]!r}")


@group.check("again", "Backends of a lane that closed make the next one")
async def _again(rig: LaneRig) -> None:
    for _ in range(3):
        left, right = await rig.pair()
        left.send(300_000)
        await rig.arrives(right, 1)
        left.close()
        right.close()
        await rig.end(left, right)
