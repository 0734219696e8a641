"""flush: as often as anybody likes, from wherever, and never more than once a frame."""

from __future__ import annotations

from kvwire.limits import MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.testing.conformance.side import LinkSide

links: Group = Group("flush")


@links.pair("nothing", "flush with an empty queue does nothing")
async def _nothing(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for _ in range(10):
        left.flush()
    await rig.settle()
    require(not right.arrived, "something arrived")
    require(not left.writable, "link_writable came although nothing was left")


@links.pair("again", "A second flush sends nothing twice")
async def _again(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for _ in range(30):
        left.queue(100_000)
        for _ in range(5):
            left.flush()
    await rig.arrives(right, 30)
    await rig.settle()
    require(right.arrived == list(range(30)), f"{len(right.arrived)} frames for 30")


@links.check("unflushed-then", "Frames queued on a full link go with the next flush")
async def _unflushed_then(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    left.send_many(20, MIB)
    left.queue_many(20, 1000)
    left.flush()
    right.start()
    await rig.moved(left, right, 40)


@links.pair("in-callbacks", "flush from within every callback is harmless")
async def _in_callbacks(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for side in (left, right):
        _flush_always(side)
        side.queue_many(8, MIB)
        side.flush()
    await rig.arrives(right, 8)
    await rig.arrives(left, 8)
    await rig.given_back(left)
    await rig.given_back(right)


def _flush_always(side: LinkSide) -> None:
    def flush(*_: object) -> None:
        side.flush()

    side.on_header = side.on_arrival = side.on_sent = side.on_writable = flush


@links.pair("closed", "flush on a closed link is harmless")
async def _closed(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.close()
    await rig.closes(left, right)
    left.flush()
    right.flush()
    await rig.settle()
