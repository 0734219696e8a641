"""abort: at any stage, at once, without an exception, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvwire.limits import MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import CUTS
from kvwire.testing.conformance.lanes.rig import LaneGroup, LaneRig
from kvwire.testing.conformance.lanes.side import LaneSide
from kvwire.testing.conformance.shared import aborting as shared

group: LaneGroup = LaneGroup("abort")
group.include(shared.group)

Stage = Callable[[LaneRig, LaneSide, LaneSide], Awaitable[None]]


async def _up(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    return


async def _idle(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.send(1000)
    await rig.arrives(right, 1)
    await rig.given_back(left)


async def _queued(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for _ in range(10):
        left.queue(100_000)


async def _sent(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.holding = True
    for _ in range(40):
        left.send(MIB, CUTS["pages"])


async def _awaiting(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for _ in range(10):
        right.queue(MIB)
    for _ in range(10):
        left.receive(left.inbox.popleft())


async def _sending(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for _ in range(6):
        left.send(4 * MIB)
    await rig.until(lambda: right.lane.received_bytes > 0, "payload arrives")


async def _receiving(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for _ in range(6):
        right.send(4 * MIB)
    await rig.until(lambda: left.lane.received_bytes > 0, "payload arrives")


async def _closing(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for _ in range(10):
        left.send(MIB)
    left.close()


async def _aborted_upon(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.send(MIB)
    right.abort()


_STAGES: dict[str, Stage] = {
    "up": _up,
    "idle": _idle,
    "queued": _queued,
    "sent": _sent,
    "awaiting": _awaiting,
    "sending": _sending,
    "receiving": _receiving,
    "closing": _closing,
    "aborted-upon": _aborted_upon,
}


@group.each("own", "abort ends a lane that is: {}", _STAGES)
async def _own(rig: LaneRig, stage: Stage) -> None:
    left, right = await rig.pair()
    await stage(rig, left, right)
    told = bool(left.closed)
    left.abort()
    await rig.closes(left)
    if not told:
        error = left.closed[0]
        expected = error is None or stage is _aborted_upon
        require(expected, f"lane_closed was told {error!r}, and we ended it")
    require(left.lane.queued_bytes == 0, f"{left.lane.queued_bytes} stay queued")
    sent, arrived = len(left.sent), len(left.arrived)
    await rig.settle()
    require(len(left.sent) == sent, "payload_sent after lane_closed")
    require(len(left.arrived) == arrived, "payload_received after lane_closed")


@group.each(
    "peer", "Payloads end, or their lane does, when the peer aborts: {}", _STAGES
)
async def _peer(rig: LaneRig, stage: Stage) -> None:
    left, right = await rig.pair()
    await stage(rig, left, right)
    left.abort()
    right.holding = False
    right.take()
    await rig.ends(right)
    await rig.closes(left)


@group.check("calls-after", "send, receive and flush after abort do nothing")
async def _calls_after(rig: LaneRig) -> None:
    left, right = await rig.pair()
    left.holding = True
    right.send(100_000)
    left.abort()
    left.queue(100_000)
    left.take()
    left.flush()
    await rig.closes(left)
    require(not left.arrived, "a payload arrived after abort")
    right.inbox.clear()
