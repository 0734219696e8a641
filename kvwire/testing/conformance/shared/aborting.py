"""abort: at once, without an exception, as often as one likes."""

from __future__ import annotations

from kvwire.limits import MIB
from kvwire.testing.conformance.check import GroupOf, require
from kvwire.testing.conformance.shared.memory import AnyRig

group: GroupOf[AnyRig] = GroupOf("abort")


@group.check("twice", "abort a second time does no harm, nor does close")
async def _twice(rig: AnyRig) -> None:
    left, right = await rig.pair()
    left.abort()
    left.abort()
    left.close()
    await rig.closes(left)
    await rig.ends(right)
    left.abort()
    await rig.settle()
    require(len(left.closed) == 1, f"the end was told {len(left.closed)} times")


@group.check("both", "Both sides abort at once")
async def _both(rig: AnyRig) -> None:
    left, right = await rig.pair()
    left.send(MIB)
    right.send(MIB)
    left.abort()
    right.abort()
    await rig.closes(left, right)


@group.check("others-live", "Aborting one leaves the others alone")
async def _others_live(rig: AnyRig) -> None:
    victim, peer = await rig.pair()
    left, right = await rig.pair()
    victim.send(16 * MIB)
    left.queue(3 * MIB)
    victim.abort()
    left.flush()
    right.take()
    await rig.closes(victim)
    await rig.ends(peer)
    await rig.arrives(right, 1)
    require(not left.closed and not right.closed, "another one closed too")
