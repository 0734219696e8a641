"""Who is called when, of links and of lanes alike."""

from __future__ import annotations

from typing import Any

from kvwire.limits import MIB
from kvwire.testing.conformance.check import GroupOf, raise_planted, require
from kvwire.testing.conformance.shared.memory import AnyRig

group: GroupOf[AnyRig] = GroupOf("callback")


@group.pair("idle", "Where nothing happens nothing is called")
async def _idle(rig: AnyRig, left: Any, right: Any) -> None:
    left.send(100_000)
    await rig.moved(left, right, 1)
    before = (right.arrived[:], len(left.sent), left.writable, right.writable)
    await rig.settle()
    after = (right.arrived[:], len(left.sent), left.writable, right.writable)
    require(before == after, f"{before} became {after}")


@group.check("unasked", "A sender needs no further call to be told what was sent")
async def _unasked(rig: AnyRig) -> None:
    left, right = await rig.held_pair()
    left.send_many(16, 2 * MIB)
    await rig.settle()
    right.release()
    await rig.given_back(left)
    await rig.arrives(right, 16)


@group.pair("abort-in-arrival", "abort at an arrival: nothing more arrives")
async def _abort_in_arrival(rig: AnyRig, left: Any, right: Any) -> None:
    right.on_arrival = lambda landing: right.abort()
    left.queue_many(10, 1000)
    left.flush()
    right.take()
    await rig.closes(right)
    await rig.ends(left)
    require(len(right.arrived) == 1, f"{len(right.arrived)} arrived")


@group.pair("abort-in-sent", "abort when something was sent ends both sides")
async def _abort_in_sent(rig: AnyRig, left: Any, right: Any) -> None:
    left.on_sent = lambda token: left.abort()
    left.queue_many(10, 1000)
    left.flush()
    right.take()
    await rig.closes(left)
    await rig.ends(right)


@group.pair("raises-closed", "A handler that raises at the end harms nobody")
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
