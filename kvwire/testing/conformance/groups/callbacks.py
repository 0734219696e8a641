"""When a handler is called, from where, and what it may do then.

That callbacks come on the loop's thread, one at a time and never from inside a call is
judged in every check; these bring about the situations in which it goes wrong.
"""

from __future__ import annotations

from typing import Any

from kvwire.limits import MIB
from kvwire.testing.conformance.check import GroupOf, Planted, raise_planted, require
from kvwire.testing.conformance.lane_side import LaneSide
from kvwire.testing.conformance.rig import AnyRig, Group, LaneGroup, LaneRig, Rig
from kvwire.testing.conformance.side import KitLanding, LinkSide

links, lanes = Group("callback"), LaneGroup("callback")
both: GroupOf[AnyRig] = GroupOf("callback", links, lanes)


@both.pair("idle", "Where nothing happens nothing is called")
async def _idle(rig: AnyRig, left: Any, right: Any) -> None:
    left.send(100_000)
    await rig.moved(left, right, 1)
    before = (right.arrived[:], len(left.sent), left.writable, right.writable)
    await rig.settle()
    after = (right.arrived[:], len(left.sent), left.writable, right.writable)
    require(before == after, f"{before} became {after}")


@both.check("unasked", "A sender needs no further call to be told what was sent")
async def _unasked(rig: AnyRig) -> None:
    left, right = await rig.held_pair()
    left.send_many(16, 2 * MIB)
    await rig.settle()
    right.release()
    await rig.given_back(left)
    await rig.arrives(right, 16)


@both.pair("abort-in-arrival", "abort at an arrival: nothing more arrives")
async def _abort_in_arrival(rig: AnyRig, left: Any, right: Any) -> None:
    right.on_arrival = lambda landing: right.abort()
    left.queue_many(10, 1000)
    left.flush()
    right.take()
    await rig.closes(right)
    await rig.ends(left)
    require(len(right.arrived) == 1, f"{len(right.arrived)} arrived")


@both.pair("abort-in-sent", "abort when something was sent ends both sides")
async def _abort_in_sent(rig: AnyRig, left: Any, right: Any) -> None:
    left.on_sent = lambda token: left.abort()
    left.queue_many(10, 1000)
    left.flush()
    right.take()
    await rig.closes(left)
    await rig.ends(right)


@both.pair("raises-closed", "A handler that raises at the end harms nobody")
async def _raises_closed(rig: AnyRig, victim: Any, peer: Any) -> None:
    left, right = await rig.pair()
    victim.on_closed = raise_planted
    with rig.expecting_errors():
        victim.abort()
        await rig.closes(victim)
        await rig.ends(peer)
        await rig.settle()
    left.send(MIB)
    await rig.arrives(right, 1)


# --- of links alone -------------------------------------------------------------------


@links.check("start", "start calls nothing, although frames wait")
async def _start(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    for size in (0, 10, 100_000):
        left.send(size)
    await rig.settle()
    right.start()
    require(not right.arrived, "a frame was delivered from inside start")
    await rig.arrives(right, 3)


@links.check("start-ended", "start calls nothing, although the peer has gone")
async def _start_ended(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    left.abort()
    await rig.closes(left)
    right.start()
    require(not right.closed, "link_closed came from inside start")
    await rig.closes(right)


@links.pair("send", "send calls nothing, although the peer has gone")
async def _send(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.abort()
    left.queue_many(50, 10_000)
    await rig.closes(left)


@links.pair("flush", "flush calls frame_sent at most")
async def _flush(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.abort()
    left.send_many(50, 100_000)
    await rig.closes(left)


@links.pair("abort", "abort calls nothing, whatever is in flight")
async def _abort(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.send_many(20, MIB)
    left.abort()
    require(not left.closed, "link_closed came from inside abort")
    await rig.closes(left, right)


@links.pair("close", "close calls nothing, whatever is in flight")
async def _close(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.queue_many(20, MIB)
    left.close()
    require(not left.closed, "link_closed came from inside close")
    await rig.closes(left, right)


@links.pair("nested", "A handler that sends from each callback is not re-entered")
async def _nested(rig: Rig, left: LinkSide, right: LinkSide) -> None:

    def answer(_: object) -> None:
        if len(right.sent) < 30:
            right.send(50_000)

    right.on_header = right.on_arrival = right.on_sent = answer
    left.send_many(10, 100_000)
    await rig.arrives(right, 10)
    await rig.given_back(right)
    await rig.arrives(left, 30)


@links.pair("sent-once", "frame_sent comes exactly once for each token")
async def _sent_once(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    tokens = [left.queue(size) for size in (0, 1, 5000, 200_000, 3 * MIB) * 4]
    left.flush()
    await rig.moved(left, right, 20)
    left.flush()
    await rig.settle()
    require(len(left.sent) == len(tokens), f"{len(left.sent)} for {len(tokens)}")


@links.pair("sent-untokened", "A frame without token brings no frame_sent")
async def _sent_untokened(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for size in (0, 100, 60_000):
        left.queue(size, token=False)
    left.flush()
    await rig.arrives(right, 3)
    await rig.settle()
    require(not left.sent, "frame_sent was called")


@links.pair("abort-in-header", "abort in header_received: the landing is ignored")
async def _abort_in_header(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.on_header = lambda head: right.abort()
    left.send_many(3, 0)
    left.send(100_000)
    await rig.closes(right, left)
    require(not right.arrived, "body_received came after abort")


@links.check("abort-in-writable", "abort in link_writable ends the link")
async def _abort_in_writable(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    left.on_writable = left.abort
    left.send_many(32, MIB)
    await rig.until(lambda: left.link.queued_bytes > 0, "the transport is full")
    right.start()
    await rig.closes(left, right)
    require(left.writable == 1, f"link_writable came {left.writable} times")


@links.pair("close-in-body", "close in body_received ends both sides cleanly")
async def _close_in_body(rig: Rig, left: LinkSide, right: LinkSide) -> None:

    def answer_and_close(landing: KitLanding) -> None:
        right.send(landing.head.length)
        right.close()

    right.on_arrival = answer_and_close
    left.send(100_000)
    await rig.closes(left, right)
    require(left.arrived == [0], "the answer was lost")
    require(left.closed == [None], f"left closed with {left.closed[0]!r}")
    require(right.closed == [None], f"right closed with {right.closed[0]!r}")


@links.pair("close-in-header", "close in header_received ends both sides")
async def _close_in_header(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.on_header = lambda head: right.close()
    left.send(10)
    await rig.closes(left, right)


@links.pair("in-closed", "Every call in link_closed is harmless")
async def _in_closed(rig: Rig, left: LinkSide, right: LinkSide) -> None:

    def call_all() -> None:
        left.queue(1000, token=False)
        left.flush()
        left.close()
        left.abort()

    left.on_closed = call_all
    right.abort()
    await rig.closes(left, right)
    await rig.settle()


# --- of lanes alone -------------------------------------------------------------------


@lanes.pair("unflushed", "send and receive call nothing, however much is there")
async def _unflushed(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.queue_many(10, 100_000)
    left.flush()
    await rig.settle()
    for _ in range(10):
        right.receive(right.inbox.popleft())
    require(not right.arrived, "payload_received came from inside receive")
    right.flush()
    await rig.arrives(right, 10)


@lanes.pair("once", "payload_sent and payload_received come once for each payload")
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


@lanes.pair("nested", "A handler may send from each callback")
async def _nested_lanes(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:

    def answer(_: object) -> None:
        if len(right.sent) + right.lent < 30:
            right.queue(50_000)
            right.flush()
            rig.loop.call_soon(left.take)

    right.on_arrival = right.on_sent = answer
    left.send_many(10, 100_000)
    await rig.arrives(right, 10)
    await rig.moved(right, left, 30)


@lanes.pair("raises-received", "A handler that raises in payload_received loses it")
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


@lanes.pair("raises-sent", "A handler that raises in payload_sent loses its lane")
async def _raises_sent(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.on_sent = raise_planted
    with rig.expecting_errors():
        left.send_many(4, 100_000)
        await rig.closes(left)
        await rig.settle()
    require(isinstance(left.closed[0], Planted), f"told {left.closed[0]!r}")
    require(len(left.sent) == 1, f"{len(left.sent)} calls came after it")
    require(len(right.arrived) <= 4, f"{len(right.arrived)} payloads of 4 arrived")


@lanes.pair("close-in-received", "close in payload_received lets the answer through")
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


@lanes.pair("in-closed", "Every call in lane_closed is harmless")
async def _in_closed_lanes(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
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
