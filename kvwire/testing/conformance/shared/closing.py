"""close: what is queued still arrives, and then comes a clean end."""

from __future__ import annotations

from typing import Any, Final

from kvwire.limits import MIB
from kvwire.testing.conformance.check import GroupOf, require
from kvwire.testing.conformance.content import CUTS
from kvwire.testing.conformance.shared.memory import AnyRig

group: GroupOf[AnyRig] = GroupOf("close")

QUEUED: Final = "What was not flushed before close arrives: {}"
FLUSHED: Final = "What was flushed before close arrives: {}"
_QUEUES: Final[dict[str, list[int]]] = {
    "nothing": [],
    "small": [100] * 100,
    "large": [16 * MIB],
    "many": [MIB] * 24,
}


async def queued(rig: AnyRig, sizes: list[int]) -> None:
    """Close with payloads that were not flushed.

    Cancel safety: not cancel safe; the pair may stay open.
    """
    left, right = await rig.pair()
    for size in sizes:
        left.queue(size, CUTS["pages"])
    left.close()
    right.take()
    await rig.arrives(right, len(sizes))
    await rig.ends_cleanly(left, right)
    require(len(right.arrived) == len(sizes), f"{len(right.arrived)} arrived")
    require(not left.lent, f"{left.lent} tokens were not given back before the end")


async def flushed(rig: AnyRig, sizes: list[int]) -> None:
    """Close with payloads that were flushed.

    Cancel safety: not cancel safe; the pair may stay open.
    """
    left, right = await rig.pair()
    for size in sizes:
        left.send(size)
    left.close()
    await rig.arrives(right, len(sizes))
    await rig.ends_cleanly(left, right)
    require(len(right.arrived) == len(sizes), f"{len(right.arrived)} arrived")
    require(not left.lent, f"{left.lent} tokens were not given back before the end")


group.each("queued", QUEUED, _QUEUES)(queued)
group.each("flushed", FLUSHED, _QUEUES)(flushed)


@group.check("unread", "What nobody receives yet is not lost by a close")
async def _unread(rig: AnyRig) -> None:
    left, right = await rig.held_pair()
    left.send_many(24, MIB)
    left.close()
    await rig.settle()
    require(not left.closed or not left.lent, "it ended with payloads under way")
    right.release()
    await rig.arrives(right, 24)
    await rig.ends_cleanly(left, right)


@group.pair("twice", "close a second time does no harm, nor after the end")
async def _twice(rig: AnyRig, left: Any, right: Any) -> None:
    left.send(MIB)
    left.close()
    left.close()
    await rig.arrives(right, 1)
    await rig.ends_cleanly(left, right)
    left.close()
    await rig.settle()
    require(right.arrived == [0], "the payload was lost")
    require(len(left.closed) == 1, f"the end was told {len(left.closed)} times")
