"""Coming up: one exchange of bootstraps, and what becomes of it when it goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvwire.errors import BackendUnavailable
from kvwire.limits import BOOTSTRAP_BYTES_MAX
from kvwire.testing.conformance.check import CheckFailed, require
from kvwire.testing.conformance.lane_side import LaneSide
from kvwire.testing.conformance.rig import LaneGroup, LaneRig

lanes: LaneGroup = LaneGroup("join")


@lanes.check("available", "availability says that it can be used here")
async def _available(rig: LaneRig) -> None:
    found = type(rig.near).availability()
    require(found.available, f"it says it cannot run here: {found.reason}")


@lanes.pair("bootstrap", "A bootstrap is short, and the same whenever it is asked")
async def _bootstrap(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for side in (left, right):
        bootstrap = side.lane.bootstrap
        require(isinstance(bootstrap, bytes), f"it is a {type(bootstrap).__name__}")
        require(len(bootstrap) <= BOOTSTRAP_BYTES_MAX, f"of {len(bootstrap)} bytes")
        require(side.lane.bootstrap == bootstrap, f"{side.name}: it changed")


@lanes.check("description", "A lane says in one line what moves its bytes")
async def _description(rig: LaneRig) -> None:
    for side in await rig.pair():
        text = side.lane.description
        require(text.strip() != "", f"{side.name}: the description is empty")
        require(text.isprintable(), f"{side.name}: no line: {text!r}")


@lanes.pair("idle", "A lane that came up counts nothing and calls nothing")
async def _idle(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    await rig.settle()
    for side in (left, right):
        lane = side.lane
        require(lane.queued_bytes == 0, f"{side.name}: {lane.queued_bytes} queued")
        require(lane.received_bytes == 0, f"{side.name}: {lane.received_bytes} came")
        require(lane.bytes_min >= 1, f"{side.name}: bytes_min is {lane.bytes_min}")
        require(not side.closed, f"{side.name} closed by itself")


@lanes.check("at-once", "The client may send as soon as its own join has returned")
async def _at_once(rig: LaneRig) -> None:
    left, right = rig.prepare()
    right.holding = True
    await rig.within(right.join(left.lane.bootstrap), "the server's join")
    await rig.within(left.join(right.lane.bootstrap), "the client's join")
    left.send(300_000)
    right.send(300_000)
    right.take()
    await rig.arrives(right, 1)
    await rig.arrives(left, 1)


@lanes.check("server-early", "A server that has joined may be told of arrivals")
async def _server_early(rig: LaneRig) -> None:
    left, right = rig.prepare()
    await rig.within(right.join(left.lane.bootstrap), "the server's join")
    right.flush()
    await rig.settle()
    await rig.within(left.join(right.lane.bootstrap), "the client's join")
    left.send(300_000)
    await rig.arrives(right, 1)


_WRONG: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "one-byte": lambda bootstrap: bootstrap[:1],
    "half": lambda bootstrap: bootstrap[: len(bootstrap) // 2],
    "too-long": lambda bootstrap: bootstrap + bytes(BOOTSTRAP_BYTES_MAX),
}


@lanes.each("refuses-client", "A server refuses a bootstrap: {}", _WRONG)
async def _refuses_client(rig: LaneRig, change: Callable[[bytes], bytes]) -> None:
    left, right = rig.prepare()
    await _refused(rig, right, change(left.lane.bootstrap))


@lanes.each("refuses-server", "A client refuses a bootstrap: {}", _WRONG)
async def _refuses_server(rig: LaneRig, change: Callable[[bytes], bytes]) -> None:
    left, right = rig.prepare()
    await rig.within(right.join(left.lane.bootstrap), "the server's join")
    await _refused(rig, left, change(right.lane.bootstrap))


async def _refused(rig: LaneRig, side: LaneSide, bootstrap: bytes) -> None:
    try:
        await rig.within(side.join(bootstrap), "join refuses what it cannot read")
    except BackendUnavailable as exc:
        require(str(exc) != "", "it does not say why")
    else:
        raise CheckFailed(f"{side.name}: join took {bootstrap[:20]!r} for a bootstrap")
    await rig.settle()
    require(not side.closed, "lane_closed was called, although join raised")


@lanes.check("peer-gone", "A client whose server has gone is refused, or is told")
async def _peer_gone(rig: LaneRig) -> None:
    left, right = rig.prepare()
    await rig.within(right.join(left.lane.bootstrap), "the server's join")
    bootstrap = right.lane.bootstrap
    right.abort()
    await rig.closes(right)
    try:
        await rig.within(left.join(bootstrap), "join of a lane that has ended")
    except BackendUnavailable:
        return
    left.send(300_000)
    left.flush()
    require(not right.arrived, "a payload arrived at a lane that was aborted")


@lanes.check("never-joined", "Lanes that are aborted before they join call nothing")
async def _never_joined(rig: LaneRig) -> None:
    left, right = rig.prepare()
    left.abort()
    left.abort()
    right.close()
    await rig.settle()
    require(not left.closed and not right.closed, "lane_closed was called")


@lanes.check("half-joined", "A server whose client never joins can be aborted")
async def _half_joined(rig: LaneRig) -> None:
    left, right = rig.prepare()
    await rig.within(right.join(left.lane.bootstrap), "the server's join")
    left.abort()
    right.abort()
    await rig.closes(right)


@lanes.check("cancelled", "A join that is cancelled leaves nothing and calls nothing")
async def _cancelled(rig: LaneRig) -> None:
    left, right = rig.prepare()
    await rig.within(right.join(left.lane.bootstrap), "the server's join")
    for turns in range(3):
        task = asyncio.ensure_future(left.join(right.lane.bootstrap))
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        require(
            ended is None or isinstance(ended, asyncio.CancelledError),
            f"a cancelled join raised {ended!r}",
        )
        right.abort()
        await rig.settle()
        require(left.begun or not left.closed, "lane_closed after a cancelled join")
        left, right = rig.prepare()
        await rig.within(right.join(left.lane.bootstrap), "the server's join")


# Loop turns after which a join is disturbed: each where a backend may be between two
# steps, then ever more, so that one that waits for its peer comes to its end as well.
_TURNS = (*range(16), *(2**n for n in range(4, 13)))


@lanes.check("aborted", "A join whose lane is aborted raises, or the lane then closes")
async def _aborted(rig: LaneRig) -> None:
    for turns in _TURNS:
        left, right = rig.prepare()
        await rig.within(right.join(left.lane.bootstrap), "the server's join")
        task = asyncio.ensure_future(left.join(right.lane.bootstrap))
        for _ in range(turns):
            await asyncio.sleep(0)
        through = task.done()
        left.abort()
        joined = asyncio.gather(task, return_exceptions=True)
        (ended,) = await rig.within(joined, "join of a lane that was aborted")
        require(
            ended is None or isinstance(ended, BackendUnavailable),
            f"aborted after {turns} turns, join raised {ended!r}",
        )
        if left.begun:
            await rig.closes(left)
        right.abort()
        await rig.closes(right)
        rig.forget(left, right)
        if through:
            return


@lanes.check("sixteen", "Sixteen lanes between two backends come up and do not mix")
async def _sixteen(rig: LaneRig) -> None:
    pairs = [await rig.pair() for _ in range(16)]
    for round_ in range(3):
        for i, (left, right) in enumerate(pairs):
            left.queue(90_000, number=1000 * i + round_)
            right.queue(90_000, number=1000 * (i + 100) + round_)
    for i, (left, right) in enumerate(pairs):
        for side in (left, right):
            side.flush()
            side.take()
        for owner, side in ((i, right), (i + 100, left)):
            await rig.arrives(side, 3)
            expected = [1000 * owner + round_ for round_ in range(3)]
            require(sorted(side.arrived) == expected, f"lane {i} got {side.arrived}")
