"""When a handler is called, from where, and what it may do then.

That callbacks come on the loop's thread, one at a time and never from inside a call is
judged in every check; these bring about the situations in which it goes wrong.
"""

from __future__ import annotations

from kvwire.limits import MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.testing.conformance.shared import callbacks as shared
from kvwire.testing.conformance.side import KitLanding, LinkSide

group: Group = Group("callback")
group.include(shared.group)


@group.check("start", "start calls nothing, although frames wait")
async def _start(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    for size in (0, 10, 100_000):
        left.send(size)
    await rig.settle()
    right.start()
    require(not right.arrived, "a frame was delivered from inside start")
    await rig.arrives(right, 3)


@group.check("start-ended", "start calls nothing, although the peer has gone")
async def _start_ended(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    left.abort()
    await rig.closes(left)
    right.start()
    require(not right.closed, "link_closed came from inside start")
    await rig.closes(right)


@group.pair("send", "send calls nothing, although the peer has gone")
async def _send(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.abort()
    left.queue_many(50, 10_000)
    await rig.closes(left)


@group.pair("flush", "flush calls frame_sent at most")
async def _flush(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.abort()
    left.send_many(50, 100_000)
    await rig.closes(left)


@group.pair("abort", "abort calls nothing, whatever is in flight")
async def _abort(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.send_many(20, MIB)
    left.abort()
    require(not left.closed, "link_closed came from inside abort")
    await rig.closes(left, right)


@group.pair("close", "close calls nothing, whatever is in flight")
async def _close(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.queue_many(20, MIB)
    left.close()
    require(not left.closed, "link_closed came from inside close")
    await rig.closes(left, right)


@group.pair("nested", "A handler that sends from each callback is not re-entered")
async def _nested(rig: Rig, left: LinkSide, right: LinkSide) -> None:

    def answer(_: object) -> None:
        if len(right.sent) < 30:
            right.send(50_000)

    right.on_header = right.on_arrival = right.on_sent = answer
    left.send_many(10, 100_000)
    await rig.arrives(right, 10)
    await rig.given_back(right)
    await rig.arrives(left, 30)


@group.pair("sent-once", "frame_sent comes exactly once for each token")
async def _sent_once(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    tokens = [left.queue(size) for size in (0, 1, 5000, 200_000, 3 * MIB) * 4]
    left.flush()
    await rig.moved(left, right, 20)
    left.flush()
    await rig.settle()
    require(len(left.sent) == len(tokens), f"{len(left.sent)} for {len(tokens)}")


@group.pair("sent-untokened", "A frame without token brings no frame_sent")
async def _sent_untokened(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for size in (0, 100, 60_000):
        left.queue(size, token=False)
    left.flush()
    await rig.arrives(right, 3)
    await rig.settle()
    require(not left.sent, "frame_sent was called")


@group.pair("abort-in-header", "abort in header_received: the landing is ignored")
async def _abort_in_header(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.on_header = lambda head: right.abort()
    left.send_many(3, 0)
    left.send(100_000)
    await rig.closes(right, left)
    require(not right.arrived, "body_received came after abort")


@group.check("abort-in-writable", "abort in link_writable ends the link")
async def _abort_in_writable(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    left.on_writable = left.abort
    left.send_many(32, MIB)
    await rig.until(lambda: left.link.queued_bytes > 0, "the transport is full")
    right.start()
    await rig.closes(left, right)
    require(left.writable == 1, f"link_writable came {left.writable} times")


@group.pair("close-in-body", "close in body_received ends both sides cleanly")
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


@group.pair("close-in-header", "close in header_received ends both sides")
async def _close_in_header(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.on_header = lambda head: right.close()
    left.send(10)
    await rig.closes(left, right)


@group.pair("in-closed", "Every call in link_closed is harmless")
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
