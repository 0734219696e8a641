"""abort: at any stage, at once, without an exception, and nobody waits for ever."""

from __future__ import annotations

from kvwire.limits import MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import CUTS
from kvwire.testing.conformance.lanes.rig import LaneGroup, LaneRig
from kvwire.testing.conformance.lanes.side import LaneSide
from kvwire.testing.conformance.shared import aborting as shared

group: LaneGroup = LaneGroup("abort")
group.include(shared.group)


async def _up(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    return


async def _sent(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.holding = True
    left.send_many(40, MIB, CUTS["pages"])


async def _awaiting(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.queue_many(10, MIB)
    for _ in range(10):
        left.receive(left.inbox.popleft())


_STAGES: dict[str, shared.Stage] = {
    **shared.STAGES,
    "up": _up,
    "sent": _sent,
    "awaiting": _awaiting,
}


@group.each("own", "abort ends a lane that is: {}", _STAGES)
async def _own(rig: LaneRig, stage: shared.Stage) -> None:
    left, right = await rig.pair()
    await stage(rig, left, right)
    told = bool(left.closed)
    left.abort()
    await rig.closes(left)
    if not told:
        error = left.closed[0]
        expected = error is None or stage is shared.aborted_upon
        require(expected, f"lane_closed was told {error!r}, and we ended it")
    require(left.lane.queued_bytes == 0, f"{left.lane.queued_bytes} stay queued")
    sent, arrived = len(left.sent), len(left.arrived)
    await rig.settle()
    require(len(left.sent) == sent, "payload_sent after lane_closed")
    require(len(left.arrived) == arrived, "payload_received after lane_closed")


@group.each(
    "peer", "Payloads end, or their lane does, when the peer aborts: {}", _STAGES
)
async def _peer(rig: LaneRig, stage: shared.Stage) -> None:
    left, right = await rig.pair()
    await stage(rig, left, right)
    left.abort()
    right.holding = False
    right.take()
    await rig.ends(right)
    await rig.closes(left)


@group.pair("calls-after", "send, receive and flush after abort do nothing")
async def _calls_after(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.holding = True
    right.send(100_000)
    left.abort()
    left.queue(100_000)
    left.take()
    left.flush()
    await rig.closes(left)
    require(not left.arrived, "a payload arrived after abort")
    right.inbox.clear()
