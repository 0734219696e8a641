"""What a lane says of its queue, and that none takes the loop for itself."""

from __future__ import annotations

import asyncio

from kvwire.limits import MIB, WAKEUP_BYTES
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import CUTS
from kvwire.testing.conformance.lanes.rig import LaneGroup, LaneRig
from kvwire.testing.conformance.lanes.side import LaneSide

group: LaneGroup = LaneGroup("pressure")


@group.pair("queued-falls", "queued_bytes falls to 0 when everything has arrived")
async def _queued_falls(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for _ in range(16):
        left.send(MIB)
        require(0 <= left.lane.queued_bytes <= 16 * MIB, "queued_bytes is out of range")
    await rig.moved(left, right, 16)
    await rig.until(lambda: left.lane.queued_bytes == 0, "queued_bytes falls to 0")


@group.pair("received-rises", "received_bytes counts every byte, dropped ones too")
async def _received_rises(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.land = lambda parcel: None
    left.send(100_000)
    await rig.arrives(right, 1)
    first = right.lane.received_bytes
    require(first >= 100_000, f"{first} after 100,000")
    left.send(MIB)
    await rig.arrives(right, 2)
    second = right.lane.received_bytes
    require(second >= first + MIB, f"{second} after {first} and 1 MiB more")


@group.pair("writable", "A lane that kept bytes at a flush says when they have gone")
async def _writable(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.holding = True
    left.send_many(48, MIB)
    left.flush()
    kept = left.lane.queued_bytes
    right.holding = False
    right.take()
    await rig.moved(left, right, 48)
    await rig.until(
        lambda: left.writable or not kept, "lane_writable after bytes were kept"
    )
    await rig.settle()
    require(left.lane.queued_bytes == 0, f"{left.lane.queued_bytes} stay queued")


@group.pair("refill", "A handler can keep a lane busy from payload_sent")
async def _refill(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:

    def refill(_: object) -> None:
        if len(left.sent) + left.lent < 64:
            left.queue(MIB, CUTS["pages"])
            left.flush()
            rig.loop.call_soon(right.take)

    left.on_sent = refill
    left.send_many(4, MIB)
    await rig.moved(left, right, 64)


@group.pair("fair-loop", "While a lane moves much, others have their turns")
async def _fair_loop(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.queue_many(16, 4 * MIB)
    left.flush()
    right.take()
    # The first flush may have moved one budget before the first turn.
    most = await _most_in_a_turn(right)
    await rig.arrives(right, 16)
    require(
        most <= 3 * WAKEUP_BYTES,
        f"{most} bytes arrived in one turn of the loop; WAKEUP_BYTES is {WAKEUP_BYTES}",
    )


async def _most_in_a_turn(side: LaneSide) -> int:
    """Count the most bytes that arrive between two turns of the loop, until all do."""
    most, before = side.lane.received_bytes, side.lane.received_bytes
    while side.expected and not side.closed:
        await asyncio.sleep(0)
        now = side.lane.received_bytes
        most, before = max(most, now - before), now
    return most


@group.check("fair-lane", "A lane with little to move is not behind one with much")
async def _fair_lane(rig: LaneRig) -> None:
    busy = await rig.pair()
    quick = await rig.pair()
    for _ in range(32):
        busy[0].queue(4 * MIB)
    busy[0].flush()
    busy[1].take()
    quick[0].send(100_000)
    await rig.arrives(quick[1], 1)
    left = busy[1].expected
    await rig.arrives(busy[1], 32)
    require(left > 0, "the short payload waited for all of the long ones")
