"""abort: at any stage, at once, without an exception, and the peer is told."""

from __future__ import annotations

from kvwire.limits import MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import Memory
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.testing.conformance.shared import aborting as shared
from kvwire.testing.conformance.side import LinkSide

group: Group = Group("abort")
group.include(shared.group)


async def _started(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    return


async def _flushed(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.send_many(10, 100_000)


async def _both(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.send(16 * MIB)
    right.send(16 * MIB)
    await rig.until(lambda: left.link.received_bytes > MIB, "payload arrives")


async def _closed_upon(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.close()


_STAGES: dict[str, shared.Stage] = {
    **shared.STAGES,
    "started": _started,
    "flushed": _flushed,
    "both-ways": _both,
    "closed-upon": _closed_upon,
}


@group.each("own", "abort ends a link that is: {}; both sides are told", _STAGES)
async def _own(rig: Rig, stage: shared.Stage) -> None:
    left, right = await rig.pair()
    await stage(rig, left, right)
    left.abort()
    await rig.closes(left, right)
    sent, arrived = len(left.sent), len(left.arrived)
    await rig.settle()
    require(len(left.sent) == sent, "frame_sent after link_closed")
    require(len(left.arrived) == arrived, "body_received after link_closed")


@group.pair("accepted", "The accepting side can abort as well")
async def _accepted(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.send(16 * MIB)
    right.abort()
    await rig.closes(right, left)


@group.check("unstarted", "abort before start ends the link, without a callback")
async def _unstarted(rig: Rig) -> None:
    left, right = await rig.pair(start_left=False)
    left.abort()
    await rig.closes(right)


@group.check("unstarted-both", "Both sides abort before they start")
async def _unstarted_both(rig: Rig) -> None:
    left, right = await rig.pair(start_left=False, start_right=False)
    left.abort()
    right.abort()
    await rig.settle()


@group.pair("send-after", "send and flush after abort do nothing")
async def _send_after(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.abort()
    left.queue(10, token=False)
    left.flush()
    await rig.closes(left, right)
    require(not right.arrived, "a frame sent after abort arrived")


@group.check("queue-empty", "Nothing is queued after abort")
async def _queue_empty(rig: Rig) -> None:
    left, _right = await rig.pair(start_right=False)
    left.send_many(32, MIB)
    left.abort()
    require(left.link.queued_bytes == 0, f"{left.link.queued_bytes} bytes are")
    await rig.closes(left)


@group.check("dropped-told", "A peer from whom frames were withheld sees an error")
async def _dropped_told(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    left.send_many(32, MIB)
    left.abort()
    right.start()
    await rig.closes(right)
    require(len(right.arrived) < 32, "abort did not drop the queue")
    require(right.closed[0] is not None, "the peer was told of a clean end")


@group.pair("cut-frame-told", "A peer left with part of a frame sees an error")
async def _cut_frame_told(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.land = lambda head: Memory(head.length)
    left.send(16 * MIB)
    await rig.until(lambda: right.link.received_bytes > MIB, "payload arrives")
    left.abort()
    await rig.closes(right)
    whole = len(right.arrived) == 1
    require(whole or right.closed[0] is not None, "half a frame was a clean end")


@group.pair("bulk-told", "A sender whose peer aborts is told, and need not wait")
async def _bulk_told(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.send_many(32, MIB)
    right.abort()
    await rig.closes(left)
    require(left.closed[0] is not None, "the end was clean, and frames were lost")
