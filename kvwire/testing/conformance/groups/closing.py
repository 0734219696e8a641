"""close: everything queued still arrives, and then both sides end cleanly."""

from __future__ import annotations

from kvwire.limits import MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import CUTS, Memory
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.testing.conformance.side import LinkSide

group: Group = Group("close")


async def _end_cleanly(rig: Rig, *sides: LinkSide) -> None:
    await rig.closes(*sides)
    for side in sides:
        error = side.closed[0]
        require(error is None, f"{side.name} closed with {error!r} after a clean end")


_QUEUES: dict[str, list[int]] = {
    "nothing": [],
    "empty": [0],
    "small": [100] * 100,
    "large": [16 * MIB],
    "many": [MIB] * 24,
}


@group.each(
    "queued", "What is queued and not flushed arrives before the end: {}", _QUEUES
)
async def _queued(rig: Rig, sizes: list[int]) -> None:
    left, right = await rig.pair()
    for size in sizes:
        left.queue(size)
    left.close()
    await _end_cleanly(rig, left, right)
    require(len(right.arrived) == len(sizes), f"{len(right.arrived)} frames came")
    require(not left.lent, f"{left.lent} tokens were not given back before the end")


@group.each("flushed", "What is flushed arrives before the end: {}", _QUEUES)
async def _flushed(rig: Rig, sizes: list[int]) -> None:
    left, right = await rig.pair()
    for size in sizes:
        left.send(size)
    left.close()
    await _end_cleanly(rig, left, right)
    require(len(right.arrived) == len(sizes), f"{len(right.arrived)} frames came")
    require(not left.lent, f"{left.lent} tokens were not given back before the end")


@group.check("cut", "Queued fragments arrive before the end")
async def _cut(rig: Rig) -> None:
    left, right = await rig.pair()
    right.land = lambda head: Memory(head.length, CUTS["uneven"])
    for _ in range(12):
        left.queue(MIB, CUTS["pages"])
    left.close()
    await _end_cleanly(rig, left, right)
    require(len(right.arrived) == 12, f"{len(right.arrived)} of 12 frames arrived")


@group.check("untokened", "Queued frames without token arrive before the end")
async def _untokened(rig: Rig) -> None:
    left, right = await rig.pair()
    sent = [left.queue(50_000, token=False) for _ in range(40)]
    left.close()
    for token in sent:
        assert token.memory is not None
        token.memory.poison(0xEE)
    await _end_cleanly(rig, left, right)
    require(len(right.arrived) == 40, f"{len(right.arrived)} of 40 frames arrived")


@group.check("unread", "What is queued reaches a peer that starts after the close")
async def _unread(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    for _ in range(24):
        left.queue(MIB)
    left.close()
    await rig.settle()
    right.start()
    await _end_cleanly(rig, left, right)
    require(len(right.arrived) == 24, f"{len(right.arrived)} of 24 frames arrived")


@group.check("against-bulk", "What is queued arrives although the peer sends bulk")
async def _against_bulk(rig: Rig) -> None:
    # A socket that is closed with unread data in it resets the connection, and a reset
    # overtakes and destroys what was sent before it.
    left, right = await rig.pair()
    for _ in range(24):
        right.send(MIB)
    for _ in range(10):
        left.queue(50_000)
    left.close()
    await rig.closes(left, right)
    require(len(right.arrived) == 10, f"{len(right.arrived)} of 10 frames arrived")


@group.check("both", "Both sides close at once")
async def _both(rig: Rig) -> None:
    left, right = await rig.pair()
    left.close()
    right.close()
    await _end_cleanly(rig, left, right)


@group.check("both-queued", "Both sides close at once, and nothing is lost")
async def _both_queued(rig: Rig) -> None:
    left, right = await rig.pair()
    for side in (left, right):
        for _ in range(12):
            side.queue(MIB)
    left.close()
    right.close()
    await _end_cleanly(rig, left, right)
    require(len(right.arrived) == 12, f"right got {len(right.arrived)} of 12 frames")
    require(len(left.arrived) == 12, f"left got {len(left.arrived)} of 12 frames")


@group.check("answered", "The side that is closed upon sees every frame, then the end")
async def _answered(rig: Rig) -> None:
    left, right = await rig.pair()
    seen: list[int] = []
    right.on_closed = lambda: seen.append(len(right.arrived))
    for _ in range(50):
        left.queue(10_000)
    left.close()
    await _end_cleanly(rig, right, left)
    require(seen == [50], f"link_closed came after {seen} frames")


@group.check("twice", "close a second time does no harm")
async def _twice(rig: Rig) -> None:
    left, right = await rig.pair()
    left.queue(1000)
    left.close()
    left.close()
    await _end_cleanly(rig, left, right)
    left.close()
    require(right.arrived == [0], "the frame was lost")


@group.check("after-peer", "close after the peer's close does no harm")
async def _after_peer(rig: Rig) -> None:
    left, right = await rig.pair()
    left.close()
    await _end_cleanly(rig, left, right)
    right.close()
    await rig.settle()


@group.check("send-after", "send and flush after close do nothing")
async def _send_after(rig: Rig) -> None:
    left, right = await rig.pair()
    left.queue(10)
    left.close()
    left.queue(10, token=False)
    left.flush()
    await _end_cleanly(rig, left, right)
    left.queue(10, token=False)
    left.flush()
    await rig.settle()
    require(right.arrived == [0], f"{len(right.arrived)} frames arrived")


@group.check("send-after-peer", "send on a link that the peer has closed does nothing")
async def _send_after_peer(rig: Rig) -> None:
    left, right = await rig.pair()
    right.close()
    await _end_cleanly(rig, left, right)
    left.queue(10, token=False)
    left.flush()
    await rig.settle()


@group.check("unstarted", "close before start ends the link, without a callback")
async def _unstarted(rig: Rig) -> None:
    left, right = await rig.pair(start_left=False)
    left.close()
    await _end_cleanly(rig, right)


@group.check("unstarted-peer", "A link is closed before the other side starts")
async def _unstarted_peer(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    left.close()
    await rig.settle()
    right.start()
    await _end_cleanly(rig, left, right)


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
    for _ in range(32):
        left.queue(MIB)
    left.close()
    left.abort()
    await rig.closes(left)
    right.start()
    await rig.closes(right)
    require(len(right.arrived) < 32, "abort did not drop the queue")
    require(right.closed[0] is not None, "the peer was told of a clean end")


@group.check("abort-later", "abort after a clean end changes nothing")
async def _abort_later(rig: Rig) -> None:
    left, right = await rig.pair()
    left.close()
    await _end_cleanly(rig, left, right)
    left.abort()
    right.abort()
    await rig.settle()
