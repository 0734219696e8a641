"""close: what is queued still moves, and then the lane ends cleanly."""

from __future__ import annotations

from kvwire.limits import MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import CUTS
from kvwire.testing.conformance.lanes.rig import LaneGroup, LaneRig
from kvwire.testing.conformance.lanes.side import LaneSide

group: LaneGroup = LaneGroup("close")


async def _ends_cleanly(rig: LaneRig, *sides: LaneSide) -> None:
    await rig.closes(*sides)
    for side in sides:
        error = side.closed[0]
        require(error is None, f"{side.name} closed with {error!r} after close")


_QUEUES: dict[str, list[int]] = {
    "nothing": [],
    "small": [100] * 100,
    "large": [16 * MIB],
    "many": [MIB] * 24,
}


@group.each("queued", "What was not flushed before close arrives: {}", _QUEUES)
async def _queued(rig: LaneRig, sizes: list[int]) -> None:
    left, right = await rig.pair()
    for size in sizes:
        left.queue(size, CUTS["pages"])
    left.close()
    right.take()
    await rig.arrives(right, len(sizes))
    await _ends_cleanly(rig, left)
    require(not left.lent, f"{left.lent} tokens were not given back before the end")


@group.each("flushed", "What was flushed before close arrives: {}", _QUEUES)
async def _flushed(rig: LaneRig, sizes: list[int]) -> None:
    left, right = await rig.pair()
    for size in sizes:
        left.send(size)
    left.close()
    await rig.arrives(right, len(sizes))
    await _ends_cleanly(rig, left)
    require(not left.lent, f"{left.lent} tokens were not given back before the end")


@group.check("unread", "A lane with payloads that nobody has received does not end")
async def _unread(rig: LaneRig) -> None:
    left, right = await rig.pair()
    right.holding = True
    for _ in range(12):
        left.send(MIB)
    left.close()
    await rig.settle()
    require(left.closed == [] or not left.lent, "it ended with payloads under way")
    right.take()
    await rig.arrives(right, 12)
    await _ends_cleanly(rig, left)


@group.check("receiving", "close lets arrivals that were queued come in")
async def _receiving(rig: LaneRig) -> None:
    left, right = await rig.pair()
    for _ in range(12):
        left.send(MIB)
    right.close()
    await rig.arrives(right, 12)
    await _ends_cleanly(rig, right)


@group.check("both", "Both sides close at once, with payloads under way both ways")
async def _both(rig: LaneRig) -> None:
    left, right = await rig.pair()
    for _ in range(12):
        left.send(MIB)
        right.send(MIB)
    left.close()
    right.close()
    await rig.arrives(right, 12)
    await rig.arrives(left, 12)
    await _ends_cleanly(rig, left, right)


@group.check("twice", "close a second time does no harm, nor after the end")
async def _twice(rig: LaneRig) -> None:
    left, right = await rig.pair()
    left.send(MIB)
    left.close()
    left.close()
    await rig.arrives(right, 1)
    await _ends_cleanly(rig, left)
    left.close()
    await rig.settle()
    require(len(left.closed) == 1, f"lane_closed came {len(left.closed)} times")


@group.check("then-abort", "abort after close ends the lane at once")
async def _then_abort(rig: LaneRig) -> None:
    left, right = await rig.pair()
    right.holding = True
    for _ in range(32):
        left.send(MIB)
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
        await _ends_cleanly(rig, left, right)
