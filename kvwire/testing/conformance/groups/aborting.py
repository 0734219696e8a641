"""abort: at any stage, at once, without an exception, and the peer is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvwire.limits import MIB
from kvwire.testing.conformance.check import GroupOf, require
from kvwire.testing.conformance.content import CUTS, Memory
from kvwire.testing.conformance.lane_side import LaneSide
from kvwire.testing.conformance.rig import AnyRig, Group, LaneGroup, LaneRig, Rig
from kvwire.testing.conformance.side import LinkSide

links, lanes = Group("abort"), LaneGroup("abort")
both: GroupOf[AnyRig] = GroupOf("abort", links, lanes)


async def _idle(rig: AnyRig, left: Any, right: Any) -> None:
    left.send(1000)
    await rig.moved(left, right, 1)


async def _queued(rig: AnyRig, left: Any, right: Any) -> None:
    left.queue_many(10, 100_000)


async def _sending(rig: AnyRig, left: Any, right: Any) -> None:
    left.send_many(6, 4 * MIB)
    await rig.until(lambda: right.received_bytes > 0, "payload arrives")


async def _receiving(rig: AnyRig, left: Any, right: Any) -> None:
    await _sending(rig, right, left)


async def _closing(rig: AnyRig, left: Any, right: Any) -> None:
    left.queue_many(10, MIB)
    left.close()


async def aborted_upon(rig: AnyRig, left: Any, right: Any) -> None:
    """Have the other side abort first."""
    left.send(MIB)
    right.abort()


Stage = Callable[[Any, Any, Any], Awaitable[None]]
STAGES: Final[dict[str, Stage]] = {
    "idle": _idle,
    "queued": _queued,
    "sending": _sending,
    "receiving": _receiving,
    "closing": _closing,
    "aborted-upon": aborted_upon,
}
"""What a pair is brought to before it is aborted; links and lanes add their own."""


@both.pair("twice", "abort a second time does no harm, nor does close")
async def _twice(rig: AnyRig, left: Any, right: Any) -> None:
    left.abort()
    left.abort()
    left.close()
    await rig.closes(left)
    await rig.ends(right)
    left.abort()
    await rig.settle()
    require(len(left.closed) == 1, f"the end was told {len(left.closed)} times")


@both.pair("both", "Both sides abort at once")
async def _both(rig: AnyRig, left: Any, right: Any) -> None:
    left.send(MIB)
    right.send(MIB)
    left.abort()
    right.abort()
    await rig.closes(left, right)


@both.pair("others-live", "Aborting one leaves the others alone")
async def _others_live(rig: AnyRig, victim: Any, peer: Any) -> None:
    left, right = await rig.pair()
    victim.send(16 * MIB)
    left.queue(3 * MIB)
    victim.abort()
    left.flush()
    right.take()
    await rig.closes(victim)
    await rig.ends(peer)
    await rig.arrives(right, 1)
    require(not left.closed and not right.closed, "another one closed too")


# --- of links alone -------------------------------------------------------------------


async def _started(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    return


async def _flushed(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.send_many(10, 100_000)


async def _both_links(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.send(16 * MIB)
    right.send(16 * MIB)
    await rig.until(lambda: left.link.received_bytes > MIB, "payload arrives")


async def _closed_upon(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.close()


_STAGES: dict[str, Stage] = {
    **STAGES,
    "started": _started,
    "flushed": _flushed,
    "both-ways": _both_links,
    "closed-upon": _closed_upon,
}


@links.each("own", "abort ends a link that is: {}; both sides are told", _STAGES)
async def _own(rig: Rig, stage: Stage) -> None:
    left, right = await rig.pair()
    await stage(rig, left, right)
    left.abort()
    await rig.closes(left, right)
    sent, arrived = len(left.sent), len(left.arrived)
    await rig.settle()
    require(len(left.sent) == sent, "frame_sent after link_closed")
    require(len(left.arrived) == arrived, "body_received after link_closed")


@links.check("unstarted", "abort before start ends the link, without a callback")
async def _unstarted(rig: Rig) -> None:
    left, right = await rig.pair(start_left=False)
    left.abort()
    await rig.closes(right)


@links.check("unstarted-both", "Both sides abort before they start")
async def _unstarted_both(rig: Rig) -> None:
    left, right = await rig.pair(start_left=False, start_right=False)
    left.abort()
    right.abort()
    await rig.settle()


@links.pair("send-after", "send and flush after abort do nothing")
async def _send_after(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.abort()
    left.queue(10, token=False)
    left.flush()
    await rig.closes(left, right)
    require(not right.arrived, "a frame sent after abort arrived")


@links.check("queue-empty", "Nothing is queued after abort")
async def _queue_empty(rig: Rig) -> None:
    left, _right = await rig.pair(start_right=False)
    left.send_many(32, MIB)
    left.abort()
    require(left.link.queued_bytes == 0, f"{left.link.queued_bytes} bytes are")
    await rig.closes(left)


@links.check("dropped-told", "A peer from whom frames were withheld sees an error")
async def _dropped_told(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    left.send_many(32, MIB)
    left.abort()
    right.start()
    await rig.closes(right)
    require(len(right.arrived) < 32, "abort did not drop the queue")
    require(right.closed[0] is not None, "the peer was told of a clean end")


@links.pair("cut-frame-told", "A peer left with part of a frame sees an error")
async def _cut_frame_told(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.land = lambda head: Memory(head.length)
    left.send(16 * MIB)
    await rig.until(lambda: right.link.received_bytes > MIB, "payload arrives")
    left.abort()
    await rig.closes(right)
    whole = len(right.arrived) == 1
    require(whole or right.closed[0] is not None, "half a frame was a clean end")


@links.pair("bulk-told", "A sender whose peer aborts is told, and need not wait")
async def _bulk_told(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.send_many(32, MIB)
    right.abort()
    await rig.closes(left)
    require(left.closed[0] is not None, "the end was clean, and frames were lost")


# --- of lanes alone -------------------------------------------------------------------


async def _up(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    return


async def _sent(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.holding = True
    left.send_many(40, MIB, CUTS["pages"])


async def _awaiting(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.queue_many(10, MIB)
    for _ in range(10):
        left.receive(left.inbox.popleft())


_STAGES_lanes: dict[str, Stage] = {
    **STAGES,
    "up": _up,
    "sent": _sent,
    "awaiting": _awaiting,
}


@lanes.each("own", "abort ends a lane that is: {}", _STAGES_lanes)
async def _own_lanes(rig: LaneRig, stage: Stage) -> None:
    left, right = await rig.pair()
    await stage(rig, left, right)
    told = bool(left.closed)
    left.abort()
    await rig.closes(left)
    if not told:
        error = left.closed[0]
        expected = error is None or stage is aborted_upon
        require(expected, f"lane_closed was told {error!r}, and we ended it")
    require(left.lane.queued_bytes == 0, f"{left.lane.queued_bytes} stay queued")
    sent, arrived = len(left.sent), len(left.arrived)
    await rig.settle()
    require(len(left.sent) == sent, "payload_sent after lane_closed")
    require(len(left.arrived) == arrived, "payload_received after lane_closed")


@lanes.each(
    "peer", "Payloads end, or their lane does, when the peer aborts: {}", _STAGES_lanes
)
async def _peer(rig: LaneRig, stage: Stage) -> None:
    left, right = await rig.pair()
    await stage(rig, left, right)
    left.abort()
    right.holding = False
    right.take()
    await rig.ends(right)
    await rig.closes(left)


@lanes.pair("calls-after", "send, receive and flush after abort do nothing")
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
