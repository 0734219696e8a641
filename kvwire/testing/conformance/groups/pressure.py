"""What a link says of its queue, and that no link takes the loop for itself."""

from __future__ import annotations

import asyncio

from kvwire.limits import HEADER_BYTES, MIB, WAKEUP_BYTES
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import CUTS
from kvwire.testing.conformance.lane_side import LaneSide
from kvwire.testing.conformance.rig import Group, LaneGroup, LaneRig, Rig
from kvwire.testing.conformance.side import LinkSide

links, lanes = Group("pressure"), LaneGroup("pressure")


# --- of links alone -------------------------------------------------------------------


# More than the buffers between two processes of one host hold.
_FRAMES = 32


async def _fill(rig: Rig, side: LinkSide) -> None:
    side.send_many(_FRAMES, MIB)
    await rig.settle()
    require(side.link.queued_bytes > 0, "the transport took 32 MiB that nobody reads")


@links.check("queued-none", "queued_bytes and received_bytes are 0 at first")
async def _queued_none(rig: Rig) -> None:
    left, right = await rig.pair(start_left=False, start_right=False)
    for side in (left, right):
        link = side.link
        require(link.queued_bytes == 0, f"{side.name}: {link.queued_bytes} queued")
        require(
            link.received_bytes == 0, f"{side.name}: {link.received_bytes} received"
        )


@links.pair("queued-counts", "queued_bytes counts headers and payload before a flush")
async def _queued_counts(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    expected = 0
    for size in (0, 1, 5000, 200_000):
        left.queue(size, CUTS["pages"] if size > 1000 else None)
        expected += HEADER_BYTES + size
        queued = left.link.queued_bytes
        require(queued == expected, f"{queued} queued, not {expected}")
    left.flush()
    await rig.arrives(right, 4)


@links.pair("queued-falls", "queued_bytes falls to 0 when all has been taken")
async def _queued_falls(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.send_many(16, MIB)
    await rig.moved(left, right, 16)
    await rig.until(lambda: left.link.queued_bytes == 0, "queued_bytes falls to 0")


@links.check("unread", "What nobody reads stays queued, however often flushed")
async def _unread(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    await _fill(rig, left)
    before = left.link.queued_bytes
    for _ in range(100):
        left.flush()
    await rig.settle()
    require(left.link.queued_bytes == before, "the queue moved, and nobody reads")
    right.start()
    await rig.arrives(right, _FRAMES)
    await rig.until(lambda: left.link.queued_bytes == 0, "queued_bytes falls to 0")


@links.check("writable", "link_writable comes once when the queue has emptied")
async def _writable(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    queued: list[int] = []
    left.on_writable = lambda: queued.append(left.link.queued_bytes)
    await _fill(rig, left)
    right.start()
    await rig.until(lambda: bool(queued), "link_writable is called")
    await rig.arrives(right, _FRAMES)
    await rig.settle()
    require(queued == [0], f"link_writable found {queued} bytes queued")


@links.pair("writable-again", "link_writable comes again when the queue empties again")
async def _writable_again(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for round_ in range(1, 4):
        left.queue_many(_FRAMES, MIB)
        left.flush()
        await rig.reaches(lambda: left.writable, round_, "calls of link_writable")
    await rig.arrives(right, 3 * _FRAMES)


@links.pair("writable-refill", "A handler can keep the link busy from link_writable")
async def _writable_refill(rig: Rig, left: LinkSide, right: LinkSide) -> None:

    def refill() -> None:
        if len(left.sent) < 4 * _FRAMES:
            left.queue_many(_FRAMES, MIB)
            left.flush()

    left.on_writable = refill
    refill()
    await rig.arrives(right, 4 * _FRAMES)


@links.pair("received-total", "received_bytes counts headers and payload")
async def _received_total(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    sizes = (0, 1, 5000, 3 * MIB)
    for size in sizes:
        left.queue(size)
    left.flush()
    await rig.arrives(right, len(sizes))
    total = sum(sizes) + len(sizes) * HEADER_BYTES
    received = right.link.received_bytes
    require(received == total, f"{received} received, not {total}")
    require(left.link.received_bytes == 0, "the sender received something")


@links.pair("received-dropped", "received_bytes counts dropped payload too")
async def _received_dropped(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.land = lambda head: None
    left.send(2 * MIB)
    await rig.arrives(right, 1)
    total = 2 * MIB + HEADER_BYTES
    received = right.link.received_bytes
    require(received == total, f"{received} received, not {total}")


@links.pair("received-rises", "received_bytes never falls, and rises within a frame")
async def _received_rises(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    seen: list[int] = []
    left.send(32 * MIB)

    def look() -> bool:
        seen.append(right.link.received_bytes)
        return bool(right.arrived)

    await rig.until(look, "the frame arrives", every_turn=True)
    require(seen == sorted(seen), "received_bytes fell")
    require(len(set(seen)) > 2, f"the whole frame came in one go: {sorted(set(seen))}")


@links.pair("fair-loop", "Others on the loop get turns while 32 MiB arrive")
async def _fair_loop(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    left.send(32 * MIB)
    await rig.arrives(right, 1)
    counting.cancel()
    require(turns >= 4, f"{turns} turns only: one callback moved too much")


@links.pair("fair-link", "A small frame overtakes 64 MiB on another link")
async def _fair_link(rig: Rig, busy: LinkSide, sink: LinkSide) -> None:
    left, right = await rig.pair()
    busy.queue_many(64, MIB)
    busy.flush()
    left.send(10)
    await rig.arrives(right, 1)
    require(len(sink.arrived) < 64, "the small frame had to wait for all of the bulk")
    await rig.arrives(sink, 64)


# --- of lanes alone -------------------------------------------------------------------


@lanes.pair("queued-falls", "queued_bytes falls to 0 when everything has arrived")
async def _queued_falls_lanes(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for _ in range(16):
        left.send(MIB)
        require(0 <= left.lane.queued_bytes <= 16 * MIB, "queued_bytes is out of range")
    await rig.moved(left, right, 16)
    await rig.until(lambda: left.lane.queued_bytes == 0, "queued_bytes falls to 0")


@lanes.pair("received-rises", "received_bytes counts every byte, dropped ones too")
async def _received_rises_lanes(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.land = lambda parcel: None
    left.send(100_000)
    await rig.arrives(right, 1)
    first = right.lane.received_bytes
    require(first >= 100_000, f"{first} after 100,000")
    left.send(MIB)
    await rig.arrives(right, 2)
    second = right.lane.received_bytes
    require(second >= first + MIB, f"{second} after {first} and 1 MiB more")


@lanes.pair("writable", "A lane that kept bytes at a flush says when they have gone")
async def _writable_lanes(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
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


@lanes.pair("refill", "A handler can keep a lane busy from payload_sent")
async def _refill(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:

    def refill(_: object) -> None:
        if len(left.sent) + left.lent < 64:
            left.queue(MIB, CUTS["pages"])
            left.flush()
            rig.loop.call_soon(right.take)

    left.on_sent = refill
    left.send_many(4, MIB)
    await rig.moved(left, right, 64)


@lanes.pair("fair-loop", "While a lane moves much, others have their turns")
async def _fair_loop_lanes(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
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


@lanes.check("fair-lane", "A lane with little to move is not behind one with much")
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
