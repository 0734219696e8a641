"""pause and resume: no header meanwhile, what is under way goes on, nothing is lost.

A link may have neither: then it says so with ``pausable``, and caches in device memory
are not moved over it. There is nothing to check of such a link.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvwire.limits import KIB, MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import Head
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.testing.conformance.side import LinkSide

links: Group = Group("pause")

Run = Callable[[Rig, LinkSide, LinkSide], Awaitable[None]]

# Small frames that come together, and such as need many turns.
_SIZES = (0, 10, 0, 7 * KIB, 100 * KIB, 3, 9 * KIB, 0, 2 * MIB, 1)


def _check(name: str, promise: str) -> Callable[[Run], None]:
    """Register the decorated coroutine as a check of what has these calls."""

    def register(run: Run) -> None:
        @links.check(name, promise)
        async def _unless_it_cannot(rig: Rig) -> None:
            left, right = await rig.pair()
            if right.link.pausable:
                await run(rig, left, right)

    return register


@_check("before", "A paused link hands over no header until it is resumed")
async def _before(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.link.pause()
    _send_all(left)
    await rig.settle()
    require(not right.arrived, "something arrived")
    right.link.resume()
    await rig.moved(left, right, len(_SIZES))


@_check("each", "Paused with a header, a link ends that frame and begins no other")
async def _each(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    headers: list[int] = []

    def pause(head: Head) -> None:
        headers.append(head.number)
        right.link.pause()

    right.on_header = pause
    _send_all(left)
    for number in range(len(_SIZES)):
        await rig.arrives(right, number + 1)
        await rig.settle()
        require(len(headers) == number + 1, f"{len(headers)} headers, {number} resumes")
        right.link.resume()
    require(right.arrived == list(range(len(_SIZES))), "not in order")
    await rig.given_back(left)


@_check("again", "Paused again before it has gone on, a link stays paused")
async def _again(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.link.pause()
    _send_all(left)
    await rig.settle()
    right.link.resume()
    right.link.pause()
    await rig.settle()
    require(not right.arrived, "something arrived")
    right.link.resume()
    await rig.moved(left, right, len(_SIZES))


@_check("end", "A paused link can be aborted, and resumed after that")
async def _end(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.link.pause()
    _send_all(left)
    await rig.settle()
    right.abort()
    right.link.resume()
    await rig.closes(right)
    require(not right.arrived, "something arrived after abort")
    left.abort()


def _send_all(side: LinkSide) -> None:
    for size in _SIZES:
        side.queue(size)
    side.flush()
