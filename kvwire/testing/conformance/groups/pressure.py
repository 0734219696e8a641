"""What is said of queues, pausing, and that nobody takes the loop for itself.

A link may have no ``pause``: then it says so with ``pausable``, and caches in device
memory are not moved over it. There is nothing to check of such a link.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from kvwire.limits import HEADER_BYTES, KIB, LANE_WAKEUP_BYTES, MIB
from kvwire.testing.conformance.check import CheckFailed, Group, require
from kvwire.testing.conformance.content import CUTS, Head, Memory, poison
from kvwire.testing.conformance.rig import AnyRig, LaneRig, Rig
from kvwire.testing.conformance.sides import KitLanding, LaneSide, LinkSide
from kvwire.types import Address

pressure: Group = Group("pressure")
pause: Group = Group("pause")
threads: Group = Group("threads")


# --- pressure -------------------------------------------------------------------------

# More than the buffers between two processes of one host hold.
_FRAMES = 32


async def _fill(rig: Rig, side: LinkSide) -> None:
    side.send_many(_FRAMES, MIB)
    await rig.settle()
    require(side.link.queued_bytes > 0, "the transport took 32 MiB that nobody reads")


@pressure.links(
    "queued-counts", "queued_bytes counts headers and payload before a flush"
)
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    expected = 0
    for size in (0, 1, 5000, 200_000):
        left.queue(size, CUTS["pages"] if size > 1000 else None)
        expected += HEADER_BYTES + size
        queued = left.link.queued_bytes
        require(queued == expected, f"{queued} queued, not {expected}")
    left.flush()
    await rig.arrives(right, 4)


@pressure.both("queued-falls", "queued_bytes falls to 0 when all has been taken")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    left.send_many(16, MIB)
    require(left.queued_bytes >= 0, f"{left.queued_bytes} bytes are queued")
    await rig.moved(left, right, 16)
    await rig.until(lambda: left.queued_bytes == 0, "queued_bytes falls to 0")


@pressure.links(
    "unread", "What nobody reads stays queued, however often flushed", held=True
)
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    await _fill(rig, left)
    before = left.link.queued_bytes
    for _ in range(100):
        left.flush()
    await rig.settle()
    require(left.link.queued_bytes == before, "the queue moved, and nobody reads")
    right.start()
    await rig.arrives(right, _FRAMES)
    await rig.until(lambda: left.link.queued_bytes == 0, "queued_bytes falls to 0")


@pressure.links(
    "writable", "link_writable comes once when the queue has emptied", held=True
)
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    queued: list[int] = []
    left.on_writable = lambda: queued.append(left.link.queued_bytes)
    await _fill(rig, left)
    right.start()
    await rig.until(lambda: bool(queued), "link_writable is called")
    await rig.arrives(right, _FRAMES)
    await rig.settle()
    require(queued == [0], f"link_writable found {queued} bytes queued")


@pressure.links(
    "writable-refill", "A handler can keep the link busy from link_writable"
)
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:

    def refill() -> None:
        if len(left.sent) < 4 * _FRAMES:
            left.queue_many(_FRAMES, MIB)
            left.flush()

    left.on_writable = refill
    refill()
    await rig.arrives(right, 4 * _FRAMES)


@pressure.links(
    "received-total",
    "received_bytes counts headers and payload: {}",
    {"landed": False, "dropped": True},
)
async def _(rig: Rig, left: LinkSide, right: LinkSide, dropped: bool) -> None:
    if dropped:
        right.land = lambda head: None
    sizes = (0, 1, 5000, 3 * MIB)
    for size in sizes:
        left.queue(size)
    left.flush()
    await rig.arrives(right, len(sizes))
    total = sum(sizes) + len(sizes) * HEADER_BYTES
    received = right.link.received_bytes
    require(received == total, f"{received} received, not {total}")
    require(left.link.received_bytes == 0, "the sender received something")


@pressure.links(
    "received-rises", "received_bytes never falls, and rises within a frame"
)
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    seen: list[int] = []
    left.send(32 * MIB)

    def look() -> bool:
        seen.append(right.link.received_bytes)
        return bool(right.arrived)

    await rig.until(look, "the frame arrives", every_turn=True)
    require(seen == sorted(seen), "received_bytes fell")
    require(len(set(seen)) > 2, f"the whole frame came in one go: {sorted(set(seen))}")


@pressure.links("fair-loop", "Others on the loop get turns while 32 MiB arrive")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    left.send(32 * MIB)
    await rig.arrives(right, 1)
    counting.cancel()
    require(turns >= 4, f"{turns} turns only: one callback moved too much")


@pressure.both("fair-other", "Who has little to move is not behind who has 64 MiB")
async def _(rig: AnyRig, busy: Any, sink: Any) -> None:
    left, right = await rig.pair()
    busy.queue_many(64, MIB)
    busy.flush()
    sink.take()
    left.send(1000)
    await rig.arrives(right, 1)
    require(len(sink.arrived) < 64, "the short one had to wait for all of the bulk")
    await rig.arrives(sink, 64)


@pressure.lanes("received-rises", "received_bytes counts every byte, dropped ones too")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.land = lambda parcel: None
    left.send(100_000)
    await rig.arrives(right, 1)
    first = right.lane.received_bytes
    require(first >= 100_000, f"{first} after 100,000")
    left.send(MIB)
    await rig.arrives(right, 2)
    second = right.lane.received_bytes
    require(second >= first + MIB, f"{second} after {first} and 1 MiB more")


@pressure.lanes(
    "writable", "A lane that kept bytes at a flush says when they have gone"
)
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.holding = True
    left.send_many(48, MIB)
    left.flush()
    kept = left.lane.queued_bytes
    right.holding = False
    right.take()
    await rig.moved(left, right, 48)
    await rig.until(
        lambda: left.writable or not kept, "lane_writable after bytes were kept"
    )
    await rig.settle()
    require(left.lane.queued_bytes == 0, f"{left.lane.queued_bytes} stay queued")


@pressure.lanes("refill", "A handler can keep a lane busy from payload_sent")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:

    def refill(_: object) -> None:
        if len(left.sent) + left.lent < 64:
            left.queue(MIB, CUTS["pages"])
            left.flush()
            rig.loop.call_soon(right.take)

    left.on_sent = refill
    left.send_many(4, MIB)
    await rig.moved(left, right, 64)


@pressure.lanes("fair-loop", "While a lane moves much, others have their turns")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.queue_many(64, MIB)
    left.flush()
    right.take()
    # The first flush may have moved one budget before the first turn.
    most = await _most_in_a_turn(right)
    await rig.arrives(right, 64)
    require(
        most <= 3 * LANE_WAKEUP_BYTES,
        f"{most} bytes arrived in one turn; LANE_WAKEUP_BYTES is {LANE_WAKEUP_BYTES}",
    )


async def _most_in_a_turn(side: LaneSide) -> int:
    """Count the most bytes that arrive between two turns of the loop, until all do."""
    most, before = side.lane.received_bytes, side.lane.received_bytes
    while side.expected and not side.closed:
        await asyncio.sleep(0)
        now = side.lane.received_bytes
        most, before = max(most, now - before), now
    return most


# --- pause ----------------------------------------------------------------------------

# Small frames that come together, and such as need many turns.
_SIZES = (0, 10, 0, 7 * KIB, 100 * KIB, 3, 9 * KIB, 0, 2 * MIB, 1)


@pause.links("before", "A paused link hands over no header until it is resumed")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    if not right.link.pausable:
        return
    right.link.pause()
    _send_all(left)
    await rig.settle()
    require(not right.arrived, "something arrived")
    right.link.resume()
    await rig.moved(left, right, len(_SIZES))


@pause.links("each", "Paused with a header, a link ends that frame and begins no other")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    if not right.link.pausable:
        return
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


@pause.links("again", "Paused again before it has gone on, a link stays paused")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    if not right.link.pausable:
        return
    right.link.pause()
    _send_all(left)
    await rig.settle()
    right.link.resume()
    right.link.pause()
    await rig.settle()
    require(not right.arrived, "something arrived")
    right.link.resume()
    await rig.moved(left, right, len(_SIZES))


@pause.links("end", "A paused link can be aborted, and resumed after that")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    if not right.link.pausable:
        return
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


# --- threads --------------------------------------------------------------------------

Far = Callable[[Rig, LinkSide], Awaitable[None]]


class Elsewhere:
    """A thread with a loop, where the other side of a link lives.

    Entered, it gives the side on this thread, started. Left, it waits for the thread.
    """

    def __init__(self, rig: Rig, far: Far) -> None:
        self._rig = rig
        self._far = far
        self._thread = threading.Thread(target=self._main, name="conformance")
        self._address: Address | None = None
        self._connected = False
        self._error: BaseException | None = None

    async def __aenter__(self) -> LinkSide:
        """Start the thread, and connect to it."""
        self._thread.start()
        await self._rig.until(
            lambda: bool(self._address) or not self._thread.is_alive(), "it listens"
        )
        if self._address is None:
            raise self._error or CheckFailed("the thread ended")
        left = self._rig.side("left", await self._rig.connect(self._address))
        self._connected = True
        left.start()
        return left

    async def __aexit__(self, _: object, error: object, __: object) -> None:
        """Wait until the far side has done what it does."""
        self._thread.join(0 if error is None else self._rig.timeout_s)
        if error is None:
            await self._rig.until(lambda: not self._thread.is_alive(), "the end there")
            if self._error is not None:
                raise self._error

    def _main(self) -> None:
        loop = type(self._rig.loop)()
        try:
            loop.run_until_complete(self._live())
        except BaseException as exc:  # noqa: BLE001 - raised again by the near side
            self._error = exc
        finally:
            loop.close()

    async def _live(self) -> None:
        near = self._rig
        rig = Rig(near.make, near.address, near.timeout_s, alone=False)
        try:
            self._address = (await rig.listen()).address
            right = rig.side("right", await rig.accept())
            # A link that is reset before its connect returns is a failed connect.
            await rig.until(lambda: self._connected, "the near side has connected")
            await self._far(rig, right)
        finally:
            await rig.aclose()


async def _echo_until_closed(rig: Rig, right: LinkSide) -> None:
    def echo(landing: KitLanding) -> None:
        right.queue(landing.length, CUTS["pages"], number=landing.number)
        right.flush()

    right.land = lambda head: Memory(head.length, CUTS["uneven"])
    right.on_arrival = echo
    right.start()
    await rig.closes(right)


async def _start_and_wait(rig: Rig, right: LinkSide) -> None:
    right.start()
    await rig.closes(right)


async def _abort_in_body(rig: Rig, right: LinkSide) -> None:
    right.on_arrival = lambda landing: right.abort()
    right.start()
    await rig.closes(right)


async def _never_start(rig: Rig, right: LinkSide) -> None:
    await rig.settle()


@threads.links("echo", "Frames go to and fro between two threads")
async def _(rig: Rig) -> None:
    async with Elsewhere(rig, _echo_until_closed) as left:
        for size in (0, 1, 5000, 300_000, MIB) * 4:
            left.send(size, CUTS["odd-pages"])
        await rig.arrives(left, 20)
        require(left.arrived == list(range(20)), f"they came as {left.arrived}")
        left.close()
        await rig.closes(left)


@threads.links("bulk", "Bulk goes both ways between threads, and memory is given back")
async def _(rig: Rig) -> None:
    async with Elsewhere(rig, _echo_until_closed) as left:
        left.on_sent = poison
        left.send_many(16, 2 * MIB)
        await rig.arrives(left, 16)
        await rig.given_back(left)
        left.close()
        await rig.closes(left)


@threads.links("abort", "abort while the other thread receives: memory is free at once")
async def _(rig: Rig) -> None:
    async with Elsewhere(rig, _start_and_wait) as left:
        sent = left.send_many(8, 4 * MIB)
        await rig.until(lambda: len(left.sent) > 0, "the first frame is sent")
        left.abort()
        await rig.closes(left)
        for token in sent:
            poison(token)


@threads.links("aborted", "abort by the other thread while this one sends")
async def _(rig: Rig) -> None:
    async with Elsewhere(rig, _abort_in_body) as left:
        left.send_many(32, MIB)
        await rig.closes(left)


@threads.links("unstarted", "The other thread ends and has not started its link")
async def _(rig: Rig) -> None:
    async with Elsewhere(rig, _never_start) as left:
        await rig.closes(left)
    left.queue(100, token=False)
    left.flush()
