"""close: everything queued still arrives, and then both sides end cleanly."""

from __future__ import annotations

from kvwire.limits import MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import CUTS, Memory
from kvwire.testing.conformance.poison import poison
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.testing.conformance.shared import closing as shared
from kvwire.testing.conformance.side import LinkSide

group: Group = Group("close")
group.include(shared.group)


group.each("queued", shared.QUEUED, {"empty": [0]})(shared.queued)
group.each("flushed", shared.FLUSHED, {"empty": [0]})(shared.flushed)


@group.pair("cut", "Queued fragments arrive before the end")
async def _cut(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.land = lambda head: Memory(head.length, CUTS["uneven"])
    left.queue_many(12, MIB, CUTS["pages"])
    left.close()
    await rig.end(left, right)
    require(len(right.arrived) == 12, f"{len(right.arrived)} of 12 frames arrived")


@group.pair("untokened", "Queued frames without token arrive before the end")
async def _untokened(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    sent = [left.queue(50_000, token=False) for _ in range(40)]
    left.close()
    for token in sent:
        poison(token)
    await rig.end(left, right)
    require(len(right.arrived) == 40, f"{len(right.arrived)} of 40 frames arrived")


@group.check("against-bulk", "What is queued arrives although the peer sends bulk")
async def _against_bulk(rig: Rig) -> None:
    # A socket that is closed with unread data in it resets the connection, and a reset
    # overtakes and destroys what was sent before it.
    left, right = await rig.pair()
    right.send_many(24, MIB)
    left.queue_many(10, 50_000)
    left.close()
    await rig.closes(left, right)
    require(len(right.arrived) == 10, f"{len(right.arrived)} of 10 frames arrived")


@group.pair("both", "Both sides close at once")
async def _both(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.close()
    right.close()
    await rig.end(left, right)


@group.pair("both-queued", "Both sides close at once, and nothing is lost")
async def _both_queued(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for side in (left, right):
        side.queue_many(12, MIB)
    left.close()
    right.close()
    await rig.end(left, right)
    require(len(right.arrived) == 12, f"right got {len(right.arrived)} of 12 frames")
    require(len(left.arrived) == 12, f"left got {len(left.arrived)} of 12 frames")


@group.pair("answered", "The side that is closed upon sees every frame, then the end")
async def _answered(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    seen: list[int] = []
    right.on_closed = lambda: seen.append(len(right.arrived))
    left.queue_many(50, 10_000)
    left.close()
    await rig.end(left, right)
    require(seen == [50], f"link_closed came after {seen} frames")


@group.pair("after-peer", "close after the peer's close does no harm")
async def _after_peer(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.close()
    await rig.end(left, right)
    right.close()
    await rig.settle()


@group.pair("send-after", "send and flush after close do nothing")
async def _send_after(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.queue(10)
    left.close()
    left.queue(10, token=False)
    left.flush()
    await rig.end(left, right)
    left.queue(10, token=False)
    left.flush()
    await rig.settle()
    require(right.arrived == [0], f"{len(right.arrived)} frames arrived")


@group.pair("send-after-peer", "send on a link that the peer has closed does nothing")
async def _send_after_peer(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.close()
    await rig.end(left, right)
    left.queue(10, token=False)
    left.flush()
    await rig.settle()


@group.check("unstarted", "close before start ends the link, without a callback")
async def _unstarted(rig: Rig) -> None:
    left, right = await rig.pair(start_left=False)
    left.close()
    await rig.end(right)


@group.check("unstarted-peer", "A link is closed before the other side starts")
async def _unstarted_peer(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    left.close()
    await rig.settle()
    right.start()
    await rig.end(left, right)


@group.check("unstarted-both", "Both sides close before they start")
async def _unstarted_both(rig: Rig) -> None:
    left, right = await rig.pair(start_left=False, start_right=False)
    left.close()
    right.close()
    await rig.settle()
    require(not left.closed, "left had no handler to tell")
    require(not right.closed, "right had no handler to tell")


@group.check("then-abort", "abort cuts a close short")
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


@group.pair("abort-later", "abort after a clean end changes nothing")
async def _abort_later(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.close()
    await rig.end(left, right)
    left.abort()
    right.abort()
    await rig.settle()
