"""A handler's calls: their time and thread, their limits, the effect of errors.

Every check already requires that callbacks come on the loop's thread, one at a time and
never from inside a call. These checks create the situations in which that goes wrong.
"""

from __future__ import annotations

from typing import Any, Final

from kvwire.limits import MIB
from kvwire_certify.conformance.check import Group, Planted, raise_planted, require
from kvwire_certify.conformance.content import CUTS, Memory
from kvwire_certify.conformance.rig import AnyRig, LaneRig, LinkRig
from kvwire_certify.conformance.sides import LaneSide, LinkSide

callback: Group = Group("callback")
isolation: Group = Group("isolation")

_HOOKS: Final = {"arrival": "on_arrival", "sent": "on_sent"}
_LINK_HOOKS: Final = {"header": "on_header", "writable": "on_writable"}
_AT_RECEIVER: Final = {"on_arrival", "on_header"}


# --- callback -------------------------------------------------------------------------


@callback.both(
    "once", "However often flush is called, each token and arrival is reported once"
)
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    for size in (1, 5000, 200_000, 3 * MIB) * 4:
        left.queue(size)
        for side in (left, right, left):
            side.flush()
    right.take()
    await rig.moved(left, right, 16)
    left.flush()
    right.flush()
    await rig.settle()


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


@callback.lanes(
    "unflushed", "send and receive make no callback, however much has arrived"
)
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.holding = True
    left.send_many(10, 100_000)
    await rig.settle()
    for _ in range(10):
        right.receive()
    right.flush()
    await rig.arrives(right, 10)


@callback.both("abort-in", "After abort in on_{}, the only callback is the end", _HOOKS)
@callback.links(
    "abort-in", "After abort in on_{}, the only callback is the end", _LINK_HOOKS
)
async def _(rig: AnyRig, left: Any, right: Any, hook: str) -> None:
    aborting, other = (right, left) if hook in _AT_RECEIVER else (left, right)
    calls: list[object] = []

    def abort(*told: object) -> None:
        calls.append(told)
        aborting.abort()

    setattr(aborting, hook, abort)
    left.send_many(32, MIB)
    await rig.closes(aborting)
    await rig.rests(other)
    # Tokens may still be given back, because their memory is free.
    require(
        len(calls) == 1 or hook == "on_sent", f"{hook} was called {len(calls)} times"
    )


@callback.both("close-in-arrival", "close at an arrival still delivers the answer")
async def _(rig: AnyRig, left: Any, right: Any) -> None:

    def answer_and_close(_: object) -> None:
        right.queue(100_000)
        right.flush()
        right.close()
        rig.loop.call_soon(left.take)

    right.on_arrival = answer_and_close
    left.send(100_000)
    await rig.arrives(left, 1)
    await rig.closes_cleanly(*rig.ended_by(right, left))


@callback.links("close-in-header", "close in header_received ends both sides")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    right.on_header = lambda head: right.close()
    left.send(10)
    await rig.closes(left, right)


@callback.links("flush-in-each", "flush inside every callback is harmless")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    for side in (left, right):
        _flush_always(side)
        side.send_many(8, MIB)
    await rig.moved(left, right, 8)
    await rig.moved(right, left, 8)


def _flush_always(side: LinkSide) -> None:
    def flush(*_: object) -> None:
        side.flush()

    side.on_header = side.on_arrival = side.on_sent = side.on_writable = flush


@callback.both("in-closed", "Every call after the end is harmless")
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
    await rig.rests(right)
    await rig.settle()


# --- isolation ------------------------------------------------------------------------


@isolation.both("sixteen", "Sixteen links or lanes between two backends do not mix")
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


@isolation.both(
    "raises", "A handler that raises in on_{} ends only its own link or lane", _HOOKS
)
@isolation.links(
    "raises",
    "A handler that raises in on_{} ends only its own link or lane",
    _LINK_HOOKS,
)
async def _(rig: AnyRig, victim: Any, peer: Any, hook: str) -> None:
    left, right = await rig.pair()
    setattr(victim, hook, raise_planted)
    with rig.expecting_errors():
        victim.send_many(32, MIB)
        peer.send(1000)
        await rig.closes(victim)
        await rig.rests(peer)
    error = victim.closed[0]
    require(isinstance(error, Planted), f"the end reported {error!r}")
    left.send(MIB)
    await rig.arrives(right, 1)


@callback.both(
    "raises-closed", "A handler that raises at the end does no harm to others"
)
async def _(rig: AnyRig, victim: Any, peer: Any) -> None:
    left, right = await rig.pair()
    victim.on_closed = raise_planted
    with rig.expecting_errors():
        victim.abort()
        await rig.closes(victim)
        await rig.rests(peer)
        await rig.settle()
    left.send(MIB)
    await rig.arrives(right, 1)


_MISFITS = {"shorter": -1, "longer": 1}


@isolation.links(
    "misfit", "A destination {} than its payload is not exceeded", _MISFITS
)
async def _(rig: LinkRig, left: LinkSide, right: LinkSide, difference: int) -> None:
    memory = Memory(100_000 + difference)
    right.land = lambda head: memory
    with rig.expecting_errors():
        left.send(100_000)
        await rig.closes(right, left)
    require(not right.arrived, "body_received was called for it")
    require(right.closed[0] is not None, "the end was clean")
    require(memory.gaps_are_whole(), "memory beside the destination was written")
