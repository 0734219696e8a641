"""How links and lanes end: close delivers the queue, and abort acts at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvwire.limits import MIB
from kvwire_certify.conformance.check import Group, require
from kvwire_certify.conformance.content import CUTS
from kvwire_certify.conformance.rig import AnyRig, LaneRig, LinkRig
from kvwire_certify.conformance.sides import LaneSide, LinkSide

close: Group = Group("close")
abort: Group = Group("abort")


# --- close ----------------------------------------------------------------------------

_QUEUES: Final[dict[str, list[int]]] = {
    "nothing": [],
    "small": [100] * 100,
    "large": [16 * MIB],
    "many": [MIB] * 24,
}
_EMPTY = {"empty": [0]}


@close.both("queued", "close delivers payload that was not flushed: {}", _QUEUES)
@close.links("queued", "close delivers payload that was not flushed: {}", _EMPTY)
async def _(rig: AnyRig, left: Any, right: Any, sizes: list[int]) -> None:
    for size in sizes:
        left.queue(size, CUTS["pages"])
    left.close()
    right.take()
    await _all_arrive(rig, left, right, len(sizes))


@close.both("flushed", "close delivers payload that was flushed: {}", _QUEUES)
@close.links("flushed", "close delivers payload that was flushed: {}", _EMPTY)
async def _(rig: AnyRig, left: Any, right: Any, sizes: list[int]) -> None:
    for size in sizes:
        left.send(size)
    left.close()
    await _all_arrive(rig, left, right, len(sizes))


@close.both(
    "unread", "close keeps payload that the peer has not received yet", held=True
)
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    left.send_many(24, MIB)
    left.close()
    await rig.settle()
    require(not left.closed or not left.lent, "it ended with payloads in flight")
    right.release()
    await _all_arrive(rig, left, right, 24)


@close.both("twice", "A second close, and calls after the end, do no harm")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    left.send(MIB)
    left.close()
    left.close()
    await _all_arrive(rig, left, right, 1)
    left.close()
    left.abort()
    await rig.settle()


async def _all_arrive(rig: AnyRig, left: Any, right: Any, count: int) -> None:
    await rig.arrives(right, count)
    await rig.closes_cleanly(*rig.ended_by(left, right))
    require(not left.lent, f"{left.lent} tokens were not given back before the end")


@close.links("against-bulk", "Queued frames arrive even if the peer is sending bulk")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    # Closing a socket with unread data resets the connection, and a reset can overtake
    # and destroy data that was sent before it.
    right.send_many(24, MIB)
    left.queue_many(10, 50_000)
    left.close()
    await rig.closes(left, right)
    require(len(right.arrived) == 10, f"{len(right.arrived)} of 10 frames arrived")


@close.both("both", "Both sides close at the same time, with much in flight both ways")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    for side in (left, right):
        side.send_many(6, MIB)
        side.queue_many(6, MIB)
    left.take()
    right.take()
    left.close()
    right.close()
    await rig.arrives(right, 12)
    await rig.arrives(left, 12)
    await rig.closes_cleanly(left, right)


@close.links("send-after", "send and flush after close do nothing")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    left.queue(10)
    left.close()
    left.queue(10, token=False)
    left.flush()
    await _all_arrive(rig, left, right, 1)
    for side in (left, right):
        side.queue(10, token=False)
        side.flush()
    await rig.settle()


@close.links("unstarted", "close before start ends the link, without a callback")
async def _(rig: LinkRig) -> None:
    left, right = await rig.pair(start_left=False)
    left.close()
    await rig.closes_cleanly(right)


@close.links(
    "unstarted-peer", "A link is closed before the other side starts", held=True
)
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    left.close()
    await rig.settle()
    right.start()
    await rig.closes_cleanly(left, right)


@close.both("then-abort", "abort ends a running close", held=True)
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    left.send_many(32, MIB)
    left.close()
    left.abort()
    await rig.closes(left)
    if isinstance(rig, LinkRig):
        right.release()
        await rig.closes(right)
        require(len(right.arrived) < 32, "abort did not drop the queue")
        require(right.closed[0] is not None, "the peer saw a clean end")
    else:
        require(left.closed == [None], f"lane_closed reported {left.closed[0]!r}")


@close.lanes("receiving", "close completes arrivals that were queued")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.send_many(12, MIB)
    right.close()
    await rig.arrives(right, 12)
    await rig.closes_cleanly(right)


# --- abort ----------------------------------------------------------------------------


async def _up(rig: AnyRig, left: Any, right: Any) -> None:
    return


async def _idle(rig: AnyRig, left: Any, right: Any) -> None:
    left.send(1000)
    await rig.moved(left, right, 1)


async def _queued(rig: AnyRig, left: Any, right: Any) -> None:
    left.queue_many(10, 100_000)


async def _flushed(rig: AnyRig, left: Any, right: Any) -> None:
    right.holding = True
    left.send_many(40, MIB, CUTS["pages"])


async def _sending(rig: AnyRig, left: Any, right: Any) -> None:
    left.send_many(6, 4 * MIB)
    await rig.until(lambda: right.received_bytes > 0, "payload arrives")


async def _receiving(rig: AnyRig, left: Any, right: Any) -> None:
    await _sending(rig, right, left)


async def _both_ways(rig: AnyRig, left: Any, right: Any) -> None:
    right.send(16 * MIB)
    await _sending(rig, left, right)


async def _closing(rig: AnyRig, left: Any, right: Any) -> None:
    left.queue_many(10, MIB)
    left.close()


async def _closed_upon(rig: AnyRig, left: Any, right: Any) -> None:
    right.close()


async def _aborted_upon(rig: AnyRig, left: Any, right: Any) -> None:
    left.send(MIB)
    right.abort()


async def _awaiting(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.queue_many(10, MIB)
    for _ in range(10):
        left.receive()


Stage = Callable[[Any, Any, Any], Awaitable[None]]
_STAGES: Final[dict[str, Stage]] = {
    "up": _up,
    "idle": _idle,
    "queued": _queued,
    "flushed": _flushed,
    "sending": _sending,
    "receiving": _receiving,
    "both-ways": _both_ways,
    "closing": _closing,
    "closed-upon": _closed_upon,
    "aborted-upon": _aborted_upon,
}
"""The states in which a pair is aborted."""
_LANE_STAGES: Final[dict[str, Stage]] = {"awaiting": _awaiting}


@abort.both("own", "abort ends links and lanes: {}", _STAGES)
@abort.lanes("own", "abort ends lanes: {}", _LANE_STAGES)
async def _(rig: AnyRig, left: Any, right: Any, stage: Stage) -> None:
    await stage(rig, left, right)
    left.abort()
    await rig.closes(*rig.ended_by(left, right))
    require(left.queued_bytes == 0, f"{left.queued_bytes} bytes are still queued")
    await rig.settle()


@abort.lanes("peer", "Payloads or their lane end when the peer aborts: {}", _STAGES)
@abort.lanes("peer", "Payloads or their lane end: {}", _LANE_STAGES)
async def _(rig: LaneRig, left: LaneSide, right: LaneSide, stage: Stage) -> None:
    await stage(rig, left, right)
    left.abort()
    right.release()
    await rig.rests(right)
    await rig.closes(left)


@abort.both("others-live", "Aborting one link or lane does not affect others")
async def _(rig: AnyRig, victim: Any, peer: Any) -> None:
    left, right = await rig.pair()
    victim.send(16 * MIB)
    left.queue(3 * MIB)
    victim.abort()
    left.flush()
    right.take()
    await rig.closes(victim)
    await rig.rests(peer)
    await rig.arrives(right, 1)
    require(not left.closed and not right.closed, "another one closed too")


@abort.links("unstarted", "abort before start ends the link, without a callback")
async def _(rig: LinkRig) -> None:
    left, right = await rig.pair(start_left=False)
    left.abort()
    await rig.closes(right)


@abort.both("send-after", "Calls after abort, even another abort, do nothing")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    left.holding = True
    right.send(100_000)
    left.abort()
    left.queue(100_000)
    left.take()
    left.flush()
    left.abort()
    left.close()
    await rig.closes(left)
    left.abort()
    await rig.settle()
    require(not right.arrived, "payload that was sent after abort arrived")


@abort.links(
    "cut-frame-told", "A peer that was left with part of a frame gets an error"
)
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    left.send(16 * MIB)
    await rig.until(lambda: right.received_bytes > MIB, "payload arrives")
    left.abort()
    await rig.closes(right)
    whole = len(right.arrived) == 1
    require(
        whole or right.closed[0] is not None,
        "an incomplete frame was reported as a clean end",
    )


@abort.links("bulk-told", "A sender whose peer aborts gets an error, and need not wait")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    left.send_many(32, MIB)
    right.abort()
    await rig.closes(left)
    require(left.closed[0] is not None, "the end was clean although frames were lost")
