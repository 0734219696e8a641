"""Whose memory it is, and when: what is of lanes alone."""

from __future__ import annotations

from kvwire.limits import MIB
from kvwire.testing.conformance.content import CUTS
from kvwire.testing.conformance.lanes.rig import LaneGroup, LaneRig
from kvwire.testing.conformance.lanes.side import LaneSide
from kvwire.testing.conformance.poison import POISON, poison
from kvwire.testing.conformance.shared import memory as shared

group: LaneGroup = LaneGroup("memory")
group.include(shared.group)


@group.pair("abort-sender-midway", "The same when the receiver is in the middle of it")
async def _abort_sender_midway(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    tokens = [left.send(4 * MIB, CUTS["pages"]) for _ in range(6)]
    await rig.until(lambda: right.lane.received_bytes > 0, "payload arrives")
    left.abort()
    await rig.closes(left)
    for token in tokens:
        poison(token)
    await rig.ends(right)


@group.pair("abort-receiver", "After abort and lane_closed the receiver writes nothing")
async def _abort_receiver(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    landed = shared.landing_in(right, None)
    left.queue_many(6, 4 * MIB)
    left.flush()
    for _ in range(6):
        right.receive(right.inbox.popleft())
    right.abort()
    await rig.closes(right)
    for memory in landed:
        memory.poison(POISON)
    left.flush()
    await rig.settle()
    shared.require_untouched(landed, "lane_closed")
