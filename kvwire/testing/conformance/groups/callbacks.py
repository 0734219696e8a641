"""When a handler is called, from where, what it may do then, and whom it harms.

That callbacks come on the loop's thread, one at a time and never from inside a call is
judged in every check; these bring about the situations in which it goes wrong.
"""

from __future__ import annotations

from typing import Any

from kvwire.backend import Link
from kvwire.limits import MIB
from kvwire.testing.conformance.check import Group, Planted, raise_planted, require
from kvwire.testing.conformance.content import CUTS, Memory
from kvwire.testing.conformance.rig import AnyRig, LaneRig, Rig
from kvwire.testing.conformance.sides import KitLanding, LaneSide, LinkSide

callback: Group = Group("callback")
flush: Group = Group("flush")
isolation: Group = Group("isolation")


# --- callback -------------------------------------------------------------------------


@callback.both("idle", "Where nothing happens nothing is called")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    left.send(100_000)
    await rig.moved(left, right, 1)
    before = (right.arrived[:], len(left.sent), left.writable, right.writable)
    await rig.settle()
    after = (right.arrived[:], len(left.sent), left.writable, right.writable)
    require(before == after, f"{before} became {after}")


@callback.both(
    "unasked", "A sender needs no further call to be told what was sent", held=True
)
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    left.send_many(16, 2 * MIB)
    await rig.settle()
    right.release()
    await rig.given_back(left)
    await rig.arrives(right, 16)


@callback.both("abort-in-arrival", "abort at an arrival: nothing more arrives")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    right.on_arrival = lambda landing: right.abort()
    left.queue_many(10, 1000)
    left.flush()
    right.take()
    await rig.closes(right)
    await rig.ends(left)
    require(len(right.arrived) == 1, f"{len(right.arrived)} arrived")


@callback.both("abort-in-sent", "abort when something was sent ends both sides")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    left.on_sent = lambda token: left.abort()
    left.queue_many(10, 1000)
    left.flush()
    right.take()
    await rig.closes(left)
    await rig.ends(right)


@callback.both("raises-closed", "A handler that raises at the end harms nobody")
async def _(rig: AnyRig, victim: Any, peer: Any) -> None:
    left, right = await rig.pair()
    victim.on_closed = raise_planted
    with rig.expecting_errors():
        victim.abort()
        await rig.closes(victim)
        await rig.ends(peer)
        await rig.settle()
    left.send(MIB)
    await rig.arrives(right, 1)


@callback.links("start", "start calls nothing, although frames wait", held=True)
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for size in (0, 10, 100_000):
        left.send(size)
    await rig.settle()
    right.start()
    require(not right.arrived, "a frame was delivered from inside start")
    await rig.arrives(right, 3)


@callback.links(
    "start-ended", "start calls nothing, although the peer has gone", held=True
)
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.abort()
    await rig.closes(left)
    right.start()
    require(not right.closed, "link_closed came from inside start")
    await rig.closes(right)


@callback.links("send", "send calls nothing, although the peer has gone")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.abort()
    left.queue_many(50, 10_000)
    await rig.closes(left)


@callback.links("flush", "flush calls frame_sent at most")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.abort()
    left.send_many(50, 100_000)
    await rig.closes(left)


@callback.links("abort", "abort calls nothing, whatever is in flight")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.send_many(20, MIB)
    left.abort()
    require(not left.closed, "link_closed came from inside abort")
    await rig.closes(left, right)


@callback.links("close", "close calls nothing, whatever is in flight")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.queue_many(20, MIB)
    left.close()
    require(not left.closed, "link_closed came from inside close")
    await rig.closes(left, right)


@callback.links("nested", "A handler that sends from each callback is not re-entered")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:

    def answer(_: object) -> None:
        if len(right.sent) < 30:
            right.send(50_000)

    right.on_header = right.on_arrival = right.on_sent = answer
    left.send_many(10, 100_000)
    await rig.arrives(right, 10)
    await rig.given_back(right)
    await rig.arrives(left, 30)


@callback.links("sent-once", "frame_sent comes exactly once for each token")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    tokens = [left.queue(size) for size in (0, 1, 5000, 200_000, 3 * MIB) * 4]
    left.flush()
    await rig.moved(left, right, 20)
    left.flush()
    await rig.settle()
    require(len(left.sent) == len(tokens), f"{len(left.sent)} for {len(tokens)}")


@callback.links("sent-untokened", "A frame without token brings no frame_sent")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for size in (0, 100, 60_000):
        left.queue(size, token=False)
    left.flush()
    await rig.arrives(right, 3)
    await rig.settle()
    require(not left.sent, "frame_sent was called")


@callback.links("abort-in-header", "abort in header_received: the landing is ignored")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.on_header = lambda head: right.abort()
    left.send_many(3, 0)
    left.send(100_000)
    await rig.closes(right, left)
    require(not right.arrived, "body_received came after abort")


@callback.links("abort-in-writable", "abort in link_writable ends the link", held=True)
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.on_writable = left.abort
    left.send_many(32, MIB)
    await rig.until(lambda: left.link.queued_bytes > 0, "the transport is full")
    right.start()
    await rig.closes(left, right)
    require(left.writable == 1, f"link_writable came {left.writable} times")


@callback.links("close-in-body", "close in body_received ends both sides cleanly")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:

    def answer_and_close(landing: KitLanding) -> None:
        right.send(landing.head.length)
        right.close()

    right.on_arrival = answer_and_close
    left.send(100_000)
    await rig.closes(left, right)
    require(left.arrived == [0], "the answer was lost")
    require(left.closed == [None], f"left closed with {left.closed[0]!r}")
    require(right.closed == [None], f"right closed with {right.closed[0]!r}")


@callback.links("close-in-header", "close in header_received ends both sides")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.on_header = lambda head: right.close()
    left.send(10)
    await rig.closes(left, right)


@callback.links("in-closed", "Every call in link_closed is harmless")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:

    def call_all() -> None:
        left.queue(1000, token=False)
        left.flush()
        left.close()
        left.abort()

    left.on_closed = call_all
    right.abort()
    await rig.closes(left, right)
    await rig.settle()


@callback.lanes("unflushed", "send and receive call nothing, however much is there")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.queue_many(10, 100_000)
    left.flush()
    await rig.settle()
    for _ in range(10):
        right.receive(right.inbox.popleft())
    require(not right.arrived, "payload_received came from inside receive")
    right.flush()
    await rig.arrives(right, 10)


@callback.lanes("once", "payload_sent and payload_received come once for each payload")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
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


@callback.lanes("nested", "A handler may send from each callback")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:

    def answer(_: object) -> None:
        if len(right.sent) + right.lent < 30:
            right.queue(50_000)
            right.flush()
            rig.loop.call_soon(left.take)

    right.on_arrival = right.on_sent = answer
    left.send_many(10, 100_000)
    await rig.arrives(right, 10)
    await rig.moved(right, left, 30)


@callback.lanes("raises-received", "A handler that raises in payload_received loses it")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
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


@callback.lanes("raises-sent", "A handler that raises in payload_sent loses its lane")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.on_sent = raise_planted
    with rig.expecting_errors():
        left.send_many(4, 100_000)
        await rig.closes(left)
        await rig.settle()
    require(isinstance(left.closed[0], Planted), f"told {left.closed[0]!r}")
    require(len(left.sent) == 1, f"{len(left.sent)} calls came after it")
    require(len(right.arrived) <= 4, f"{len(right.arrived)} payloads of 4 arrived")


@callback.lanes(
    "close-in-received", "close in payload_received lets the answer through"
)
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:

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


@callback.lanes("in-closed", "Every call in lane_closed is harmless")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
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


# --- flush ----------------------------------------------------------------------------


@flush.links("nothing", "flush with an empty queue does nothing")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for _ in range(10):
        left.flush()
    await rig.settle()
    require(not right.arrived, "something arrived")
    require(not left.writable, "link_writable came although nothing was left")


@flush.links("again", "A second flush sends nothing twice")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for _ in range(30):
        left.queue(100_000)
        for _ in range(5):
            left.flush()
    await rig.arrives(right, 30)
    await rig.settle()
    require(right.arrived == list(range(30)), f"{len(right.arrived)} frames for 30")


@flush.links(
    "unflushed-then", "Frames queued on a full link go with the next flush", held=True
)
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    left.send_many(20, MIB)
    left.queue_many(20, 1000)
    left.flush()
    right.start()
    await rig.moved(left, right, 40)


@flush.links("in-callbacks", "flush from within every callback is harmless")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
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


@flush.links("closed", "flush on a closed link is harmless")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.close()
    await rig.closes(left, right)
    left.flush()
    right.flush()
    await rig.settle()


# --- isolation ------------------------------------------------------------------------


@isolation.links("sixteen", "Frames of sixteen links do not mix")
async def _(rig: Rig) -> None:
    pairs = [await rig.pair() for _ in range(16)]
    for _ in range(4):
        for i, (left, right) in enumerate(pairs):
            _queue_own(left, i)
            _queue_own(right, i + 100)
    await _all_own(rig, pairs, 4)


@isolation.links("listeners", "Links of two listeners come to the right one")
async def _(rig: Rig) -> None:
    seen: dict[str, list[Link]] = {"first": [], "second": []}
    first = await rig.listen(accept=seen["first"].append)
    second = await rig.listen(accept=seen["second"].append)
    for listener in (first, second, second):
        await rig.connect(listener.address)
    await rig.until(lambda: len(seen["second"]) == 2, "the second listener has two")
    await rig.until(lambda: len(seen["first"]) == 1, "the first listener has one")
    await rig.settle()
    require(len(seen["first"]) == 1, f"the first has {len(seen['first'])}")


def _queue_own(side: LinkSide, owner: int) -> None:
    """Queue a frame that says whose it is."""
    number = owner * 1000 + side.queued
    side.queue(number % 9 * 20_000, CUTS["pages"], number=number)
    side.flush()


async def _all_own(
    rig: Rig, pairs: list[tuple[LinkSide, LinkSide]], count: int
) -> None:
    for i, (left, right) in enumerate(pairs):
        for owner, receiver in ((i, right), (i + 100, left)):
            await rig.arrives(receiver, count)
            expected = [owner * 1000 + n for n in range(count)]
            require(
                receiver.arrived == expected,
                f"link {i} got {receiver.arrived[:5]}, not {expected[:5]}",
            )


_HOOKS = {
    "header": "on_header",
    "body": "on_arrival",
    "sent": "on_sent",
    "writable": "on_writable",
}


@isolation.links(
    "raises", "A handler that raises in {} loses its link, with the error", _HOOKS
)
async def _(rig: Rig, victim: LinkSide, peer: LinkSide, hook: str) -> None:
    left, right = await rig.pair()
    setattr(victim, hook, raise_planted)
    with rig.expecting_errors():
        victim.queue_many(32, MIB)
        victim.flush()
        peer.send(1000)
        await rig.closes(victim, peer)
    error = victim.closed[0]
    require(isinstance(error, Planted), f"link_closed was told {error!r}")
    left.send(MIB)
    await rig.arrives(right, 1)


_MISFITS = {"shorter": -1, "longer": 1}


@isolation.links(
    "misfit", "A destination {} than its payload is not written beyond", _MISFITS
)
async def _(rig: Rig, left: LinkSide, right: LinkSide, difference: int) -> None:
    memory = Memory(100_000 + difference)
    right.land = lambda head: memory
    with rig.expecting_errors():
        left.send(100_000)
        await rig.closes(right, left)
    require(not right.arrived, "body_received came for it")
    require(right.closed[0] is not None, "the end was clean")
    require(memory.gaps_are_whole(), "memory beside the destination was written")


@isolation.links("reversed", "Each backend can listen and connect at once")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    links: list[Link] = []
    listener = await rig.near.listen(rig.address, links.append)
    link = await rig.far.connect(listener.address)
    await rig.until(lambda: bool(links), "the near backend accepts a link")
    back, forth = rig.side("back", link), rig.side("forth", links[0])
    back.start()
    forth.start()
    back.land = lambda head: Memory(head.length, CUTS["uneven"])
    forth.send(200_000)
    left.send(100)
    await rig.arrives(back, 1)
    await rig.arrives(right, 1)
    await listener.close()
