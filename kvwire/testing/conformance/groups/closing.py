"""close: everything queued still arrives, and then both sides end cleanly."""

from __future__ import annotations

from typing import Any, Final

from kvwire.limits import MIB
from kvwire.testing.conformance.check import GroupOf, require
from kvwire.testing.conformance.content import CUTS, Memory, poison
from kvwire.testing.conformance.lane_side import LaneSide
from kvwire.testing.conformance.rig import AnyRig, Group, LaneGroup, LaneRig, Rig
from kvwire.testing.conformance.side import LinkSide

links, lanes = Group("close"), LaneGroup("close")
both: GroupOf[AnyRig] = GroupOf("close", links, lanes)


QUEUED: Final = "What was not flushed before close arrives: {}"
FLUSHED: Final = "What was flushed before close arrives: {}"
_QUEUES: Final[dict[str, list[int]]] = {
    "nothing": [],
    "small": [100] * 100,
    "large": [16 * MIB],
    "many": [MIB] * 24,
}


async def queued(rig: AnyRig, sizes: list[int]) -> None:
    """Close with payloads that were not flushed.

    Cancel safety: not cancel safe; the pair may stay open.
    """
    left, right = await rig.pair()
    for size in sizes:
        left.queue(size, CUTS["pages"])
    left.close()
    right.take()
    await rig.arrives(right, len(sizes))
    await rig.ends_cleanly(left, right)
    require(len(right.arrived) == len(sizes), f"{len(right.arrived)} arrived")
    require(not left.lent, f"{left.lent} tokens were not given back before the end")


async def flushed(rig: AnyRig, sizes: list[int]) -> None:
    """Close with payloads that were flushed.

    Cancel safety: not cancel safe; the pair may stay open.
    """
    left, right = await rig.pair()
    for size in sizes:
        left.send(size)
    left.close()
    await rig.arrives(right, len(sizes))
    await rig.ends_cleanly(left, right)
    require(len(right.arrived) == len(sizes), f"{len(right.arrived)} arrived")
    require(not left.lent, f"{left.lent} tokens were not given back before the end")


both.each("queued", QUEUED, _QUEUES)(queued)
both.each("flushed", FLUSHED, _QUEUES)(flushed)


@both.check("unread", "What nobody receives yet is not lost by a close")
async def _unread(rig: AnyRig) -> None:
    left, right = await rig.held_pair()
    left.send_many(24, MIB)
    left.close()
    await rig.settle()
    require(not left.closed or not left.lent, "it ended with payloads under way")
    right.release()
    await rig.arrives(right, 24)
    await rig.ends_cleanly(left, right)


@both.pair("twice", "close a second time does no harm, nor after the end")
async def _twice(rig: AnyRig, left: Any, right: Any) -> None:
    left.send(MIB)
    left.close()
    left.close()
    await rig.arrives(right, 1)
    await rig.ends_cleanly(left, right)
    left.close()
    await rig.settle()
    require(right.arrived == [0], "the payload was lost")
    require(len(left.closed) == 1, f"the end was told {len(left.closed)} times")


# --- of links alone -------------------------------------------------------------------


links.each("queued", QUEUED, {"empty": [0]})(queued)
links.each("flushed", FLUSHED, {"empty": [0]})(flushed)


@links.pair("untokened", "Queued frames without token arrive before the end")
async def _untokened(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.land = lambda head: Memory(head.length, CUTS["uneven"])
    sent = [left.queue(50_000, CUTS["pages"], token=False) for _ in range(40)]
    left.close()
    for token in sent:
        poison(token)
    await rig.end(left, right)
    require(len(right.arrived) == 40, f"{len(right.arrived)} of 40 frames arrived")


@links.check("against-bulk", "What is queued arrives although the peer sends bulk")
async def _against_bulk(rig: Rig) -> None:
    # A socket that is closed with unread data in it resets the connection, and a reset
    # overtakes and destroys what was sent before it.
    left, right = await rig.pair()
    right.send_many(24, MIB)
    left.queue_many(10, 50_000)
    left.close()
    await rig.closes(left, right)
    require(len(right.arrived) == 10, f"{len(right.arrived)} of 10 frames arrived")


@links.pair("both", "Both sides close at once")
async def _both(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.close()
    right.close()
    await rig.end(left, right)


@links.pair("both-queued", "Both sides close at once, and nothing is lost")
async def _both_queued(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for side in (left, right):
        side.queue_many(12, MIB)
    left.close()
    right.close()
    await rig.end(left, right)
    require(len(right.arrived) == 12, f"right got {len(right.arrived)} of 12 frames")
    require(len(left.arrived) == 12, f"left got {len(left.arrived)} of 12 frames")


@links.pair("answered", "The side that is closed upon sees every frame, then the end")
async def _answered(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    seen: list[int] = []
    right.on_closed = lambda: seen.append(len(right.arrived))
    left.queue_many(50, 10_000)
    left.close()
    await rig.end(left, right)
    require(seen == [50], f"link_closed came after {seen} frames")


@links.pair("send-after", "send and flush after close do nothing")
async def _send_after(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.queue(10)
    left.close()
    left.queue(10, token=False)
    left.flush()
    await rig.end(left, right)
    for side in (left, right):
        side.queue(10, token=False)
        side.flush()
    await rig.settle()
    require(right.arrived == [0], f"{len(right.arrived)} frames arrived")
    require(not left.arrived, "a frame came from a side that was closed upon")


@links.check("unstarted", "close before start ends the link, without a callback")
async def _unstarted(rig: Rig) -> None:
    left, right = await rig.pair(start_left=False)
    left.close()
    await rig.end(right)


@links.check("unstarted-peer", "A link is closed before the other side starts")
async def _unstarted_peer(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    left.close()
    await rig.settle()
    right.start()
    await rig.end(left, right)


@links.check("unstarted-both", "Both sides close before they start")
async def _unstarted_both(rig: Rig) -> None:
    left, right = await rig.pair(start_left=False, start_right=False)
    left.close()
    right.close()
    await rig.settle()
    require(not left.closed, "left had no handler to tell")
    require(not right.closed, "right had no handler to tell")


@links.check("then-abort", "abort cuts a close short")
async def _then_abort(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    left.queue_many(32, MIB)
    left.close()
    left.abort()
    await rig.closes(left)
    right.start()
    await rig.closes(right)
    require(len(right.arrived) < 32, "abort did not drop the queue")
    require(right.closed[0] is not None, "the peer was told of a clean end")


@links.pair("later", "close and abort after a clean end change nothing")
async def _later(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.close()
    await rig.end(left, right)
    right.close()
    left.abort()
    right.abort()
    await rig.settle()


# --- of lanes alone -------------------------------------------------------------------


@lanes.pair("receiving", "close lets arrivals that were queued come in")
async def _receiving(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.send_many(12, MIB)
    right.close()
    await rig.arrives(right, 12)
    await rig.end(right)


@lanes.pair("both", "Both sides close at once, with payloads under way both ways")
async def _both_lanes(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for _ in range(12):
        left.send(MIB)
        right.send(MIB)
    left.close()
    right.close()
    await rig.arrives(right, 12)
    await rig.arrives(left, 12)
    await rig.end(left, right)


@lanes.pair("then-abort", "abort after close ends the lane at once")
async def _then_abort_lanes(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.holding = True
    left.send_many(32, MIB)
    left.close()
    left.abort()
    await rig.closes(left)
    require(left.closed == [None], f"lane_closed was told {left.closed[0]!r}")


@lanes.check("again", "Backends of a lane that closed make the next one")
async def _again(rig: LaneRig) -> None:
    for _ in range(3):
        left, right = await rig.pair()
        left.send(300_000)
        await rig.arrives(right, 1)
        left.close()
        right.close()
        await rig.end(left, right)
