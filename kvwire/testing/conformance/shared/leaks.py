"""Nothing is left behind, however often and however badly it ends."""

from __future__ import annotations

import weakref

from kvwire.testing.conformance.check import GroupOf
from kvwire.testing.conformance.growth import require_collected
from kvwire.testing.conformance.shared.memory import AnyRig

group: GroupOf[AnyRig] = GroupOf("leak")


async def exchange_and_close(rig: AnyRig) -> None:
    """Move one payload, and end cleanly.

    Cancel safety: not cancel safe; it may stay open.
    """
    left, right = await rig.pair()
    left.send(100_000)
    await rig.arrives(right, 1)
    left.close()
    right.close()
    await rig.closes(left, right)


@group.check("collected", "What has ended is collected, and so is its handler")
async def _collected(rig: AnyRig) -> None:
    await rig.pair()
    await exchange_and_close(rig)
    left, right = rig.sides[-2:]
    await rig.settle()
    alive = [weakref.ref(side) for side in (left, right)]
    rig.forget(left, right)
    del left, right
    await rig.settle()
    require_collected(alive, "handlers")
