"""Who is called when: once each, from the loop, and never from inside a call.

Every side judges its callbacks in every check; these provoke what is easily got wrong.
"""

from __future__ import annotations

from kvwire.limits import MIB
from kvwire.testing.conformance.check import Planted, raise_planted, require
from kvwire.testing.conformance.lanes.rig import LaneGroup, LaneRig
from kvwire.testing.conformance.lanes.side import LaneSide
from kvwire.testing.conformance.shared import callbacks as shared

group: LaneGroup = LaneGroup("callback")
group.include(shared.group)


@group.pair("unflushed", "send and receive call nothing, however much is there")
async def _unflushed(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.queue_many(10, 100_000)
    left.flush()
    await rig.settle()
    for _ in range(10):
        right.receive(right.inbox.popleft())
    require(not right.arrived, "payload_received came from inside receive")
    right.flush()
    await rig.arrives(right, 10)


@group.pair("once", "payload_sent and payload_received come once for each payload")
async def _once(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for size in (1, 5000, 200_000, 3 * MIB) * 4:
        left.queue(size)
    left.flush()
    right.take()
    await rig.moved(left, right, 16)
    for side in (left, right, left, right):
        side.flush()
    await rig.settle()
    require(len(left.sent) == 16, f"{len(left.sent)} calls of payload_sent for 16")
    require(len(right.arrived) == 16, f"{len(right.arrived)} of payload_received")


@group.pair("nested", "A handler may send from each callback")
async def _nested(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:

    def answer(_: object) -> None:
        if len(right.sent) + right.lent < 30:
            right.queue(50_000)
            right.flush()
            rig.loop.call_soon(left.take)

    right.on_arrival = right.on_sent = answer
    left.send_many(10, 100_000)
    await rig.arrives(right, 10)
    await rig.moved(right, left, 30)


@group.pair("raises-received", "A handler that raises in payload_received loses it")
async def _raises_received(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    others = await rig.pair()
    right.on_arrival = raise_planted
    with rig.expecting_errors():
        left.send_many(4, 100_000)
        await rig.closes(right)
        await rig.settle()
    require(isinstance(right.closed[0], Planted), f"told {right.closed[0]!r}")
    require(len(right.arrived) == 1, f"{len(right.arrived)} payloads came after it")
    others[0].send(100_000)
    await rig.arrives(others[1], 1)


@group.pair("raises-sent", "A handler that raises in payload_sent loses its lane")
async def _raises_sent(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.on_sent = raise_planted
    with rig.expecting_errors():
        left.send_many(4, 100_000)
        await rig.closes(left)
        await rig.settle()
    require(isinstance(left.closed[0], Planted), f"told {left.closed[0]!r}")
    require(len(left.sent) == 1, f"{len(left.sent)} calls came after it")
    require(len(right.arrived) <= 4, f"{len(right.arrived)} payloads of 4 arrived")


@group.pair("close-in-received", "close in payload_received lets the answer through")
async def _close_in_received(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:

    def answer_and_close(_: object) -> None:
        right.queue(100_000)
        right.flush()
        right.close()

    right.on_arrival = answer_and_close
    left.send(100_000)
    await rig.until(lambda: left.inbox, "the answer is sent")
    left.take()
    await rig.arrives(left, 1)
    await rig.closes(right)
    require(right.closed == [None], f"lane_closed was told {right.closed[0]!r}")


@group.pair("in-closed", "Every call in lane_closed is harmless")
async def _in_closed(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.send(1000)
    left.holding = True

    def call_all() -> None:
        left.queue(1000)
        left.take()
        left.flush()
        left.close()
        left.abort()

    left.on_closed = call_all
    left.abort()
    await rig.closes(left)
    await rig.settle()
    require(len(left.closed) == 1, f"lane_closed came {len(left.closed)} times")
