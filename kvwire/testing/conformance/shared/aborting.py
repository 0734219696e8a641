"""abort: at once, without an exception, as often as one likes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvwire.limits import MIB
from kvwire.testing.conformance.check import GroupOf, require
from kvwire.testing.conformance.shared.memory import AnyRig

group: GroupOf[AnyRig] = GroupOf("abort")


async def _idle(rig: AnyRig, left: Any, right: Any) -> None:
    left.send(1000)
    await rig.moved(left, right, 1)


async def _queued(rig: AnyRig, left: Any, right: Any) -> None:
    left.queue_many(10, 100_000)


async def _sending(rig: AnyRig, left: Any, right: Any) -> None:
    left.send_many(6, 4 * MIB)
    await rig.until(lambda: right.received_bytes > 0, "payload arrives")


async def _receiving(rig: AnyRig, left: Any, right: Any) -> None:
    await _sending(rig, right, left)


async def _closing(rig: AnyRig, left: Any, right: Any) -> None:
    left.queue_many(10, MIB)
    left.close()


async def aborted_upon(rig: AnyRig, left: Any, right: Any) -> None:
    """Have the other side abort first."""
    left.send(MIB)
    right.abort()


Stage = Callable[[Any, Any, Any], Awaitable[None]]
STAGES: Final[dict[str, Stage]] = {
    "idle": _idle,
    "queued": _queued,
    "sending": _sending,
    "receiving": _receiving,
    "closing": _closing,
    "aborted-upon": aborted_upon,
}
"""What a pair is brought to before it is aborted; links and lanes add their own."""


@group.pair("twice", "abort a second time does no harm, nor does close")
async def _twice(rig: AnyRig, left: Any, right: Any) -> None:
    left.abort()
    left.abort()
    left.close()
    await rig.closes(left)
    await rig.ends(right)
    left.abort()
    await rig.settle()
    require(len(left.closed) == 1, f"the end was told {len(left.closed)} times")


@group.pair("both", "Both sides abort at once")
async def _both(rig: AnyRig, left: Any, right: Any) -> None:
    left.send(MIB)
    right.send(MIB)
    left.abort()
    right.abort()
    await rig.closes(left, right)


@group.pair("others-live", "Aborting one leaves the others alone")
async def _others_live(rig: AnyRig, victim: Any, peer: Any) -> None:
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
