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
from kvwire.testing.conformance.sides import LaneSide, LinkSide

callback: Group = Group("callback")
flush: Group = Group("flush")
isolation: Group = Group("isolation")


# --- callback -------------------------------------------------------------------------


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


@callback.both("nested", "A handler that sends from each callback is not re-entered")
async def _(rig: AnyRig, left: Any, right: Any) -> None:

    def answer(_: object) -> None:
        if len(right.sent) + right.lent < 30:
            right.queue(50_000)
            right.flush()
            rig.loop.call_soon(left.take)

    right.on_arrival = right.on_sent = answer
    left.send_many(10, 100_000)
    await rig.arrives(right, 10)
    await rig.moved(right, left, 30)


@callback.both("once", "Each token and each arrival is told exactly once")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    for size in (1, 5000, 200_000, 3 * MIB) * 4:
        left.queue(size)
    left.flush()
    right.take()
    await rig.moved(left, right, 16)
    for side in (left, right, left, right):
        side.flush()
    await rig.settle()
    require(len(left.sent) == 16, f"{len(left.sent)} tokens of 16 were given back")
    require(len(right.arrived) == 16, f"{len(right.arrived)} arrivals of 16")


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


@callback.both("close-in-arrival", "close at an arrival lets the answer through")
async def _(rig: AnyRig, left: Any, right: Any) -> None:

    def answer_and_close(_: object) -> None:
        right.queue(100_000)
        right.flush()
        right.close()
        rig.loop.call_soon(left.take)

    right.on_arrival = answer_and_close
    left.send(100_000)
    await rig.arrives(left, 1)
    await rig.ends_cleanly(right, left)


@callback.links("close-in-header", "close in header_received ends both sides")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.on_header = lambda head: right.close()
    left.send(10)
    await rig.closes(left, right)


@callback.both("in-closed", "Every call at the end is harmless")
async def _(rig: AnyRig, left: Any, right: Any) -> None:

    def call_all() -> None:
        left.queue(1000)
        left.take()
        left.flush()
        left.close()
        left.abort()

    left.on_closed = call_all
    left.abort()
    await rig.closes(left)
    await rig.ends(right)
    await rig.settle()
    require(len(left.closed) == 1, f"the end was told {len(left.closed)} times")


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


# --- flush ----------------------------------------------------------------------------


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


# --- isolation ------------------------------------------------------------------------


@isolation.both("sixteen", "Sixteen between two backends do not mix")
async def _(rig: AnyRig) -> None:
    pairs = [await rig.pair() for _ in range(16)]
    for round_ in range(4):
        for i, (left, right) in enumerate(pairs):
            left.queue(90_000, CUTS["pages"], number=1000 * i + round_)
            right.queue(90_000, CUTS["pages"], number=1000 * (i + 100) + round_)
    for i, (left, right) in enumerate(pairs):
        for side in (left, right):
            side.flush()
            side.take()
        for owner, side in ((i, right), (i + 100, left)):
            await rig.arrives(side, 4)
            expected = [1000 * owner + round_ for round_ in range(4)]
            require(sorted(side.arrived) == expected, f"{i} got {side.arrived}")


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


_HOOKS = {"arrival": "on_arrival", "sent": "on_sent"}
_LINK_HOOKS = {"header": "on_header", "writable": "on_writable"}


@isolation.both(
    "raises", "A handler that raises in on_{} loses what is its own, alone", _HOOKS
)
@isolation.links(
    "raises", "A handler that raises in on_{} loses what is its own, alone", _LINK_HOOKS
)
async def _(rig: AnyRig, victim: Any, peer: Any, hook: str) -> None:
    left, right = await rig.pair()
    setattr(victim, hook, raise_planted)
    with rig.expecting_errors():
        victim.queue_many(32, MIB)
        victim.flush()
        peer.take()
        peer.send(1000)
        await rig.closes(victim)
        await rig.ends(peer)
    error = victim.closed[0]
    require(isinstance(error, Planted), f"at the end it was told {error!r}")
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
