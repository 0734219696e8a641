"""Queues, pausing, and fair use of the event loop.

A link without ``pause`` reports so in ``pausable``; caches in device memory are not
moved over it, and these checks skip it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Final

from kvwire.aio import start_task
from kvwire.limits import HEADER_BYTES, KIB, LANE_WAKEUP_BYTES, MIB
from kvwire.types import Address
from kvwire_certify.conformance.check import Group, require
from kvwire_certify.conformance.content import CUTS, Head, poison
from kvwire_certify.conformance.rig import AnyRig, LaneRig, LinkRig
from kvwire_certify.conformance.sides import KitLanding, LaneSide, LinkSide

pressure: Group = Group("pressure")
pause: Group = Group("pause")
threads: Group = Group("threads")


# --- pressure -------------------------------------------------------------------------

# More than the buffers between two processes on one host can hold.
_FRAMES: Final = 32


@pressure.links(
    "queued-counts", "queued_bytes counts headers and payload before a flush"
)
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    expected = 0
    for size in (0, 1, 5000, 200_000):
        left.queue(size, CUTS["pages"] if size > 1000 else None)
        expected += HEADER_BYTES + size
        queued = left.queued_bytes
        require(queued == expected, f"{queued} queued, not {expected}")
    left.flush()
    await rig.arrives(right, 4)


@pressure.links(
    "unread",
    "Unread data stays queued; once it is sent, link_writable is called once",
    held=True,
)
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    left.send_many(_FRAMES, MIB)
    await rig.settle()
    before = left.queued_bytes
    require(before > 0, "the transport accepted 32 MiB that the peer does not read")
    for _ in range(100):
        left.flush()
    await rig.settle()
    require(
        left.queued_bytes == before, "the queue moved although the peer does not read"
    )
    require(
        not left.writable, "link_writable was called although the peer does not read"
    )
    right.start()
    await rig.arrives(right, _FRAMES)
    await rig.until(lambda: left.writable, "link_writable is called")
    await rig.settle()
    require(left.queued_bytes == 0, f"{left.queued_bytes} bytes are still queued")
    require(left.writable == 1, f"link_writable was called {left.writable} times")


@pressure.both(
    "received-total",
    "received_bytes counts every byte, once: {}",
    {"landed": False, "dropped": True},
)
async def _(rig: AnyRig, left: Any, right: Any, dropped: bool) -> None:
    if dropped:
        right.land = lambda item: None
    sizes = (1, 5000, 3 * MIB)
    for size in sizes:
        left.send(size)
    await rig.arrives(right, len(sizes))
    received = right.received_bytes
    total = sum(sizes)
    if isinstance(rig, LinkRig):
        total += len(sizes) * HEADER_BYTES
        require(received == total, f"{received} received, not {total}")
        require(left.received_bytes == 0, "the sender received data")
    require(received >= total, f"{received} received, not {total}")


@pressure.lanes(
    "writable",
    "A lane that kept bytes at a flush calls lane_writable when they are gone",
    held=True,
)
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.send_many(48, MIB)
    left.flush()
    kept = left.queued_bytes
    right.release()
    await rig.moved(left, right, 48)
    await rig.until(
        lambda: left.writable or not kept, "lane_writable after bytes were kept"
    )
    await rig.settle()
    require(left.queued_bytes == 0, f"{left.queued_bytes} stay queued")


@pressure.both("refill", "A handler can send more whenever memory or room is freed")
async def _(rig: AnyRig, left: Any, right: Any) -> None:

    def refill(*_: object) -> None:
        if len(left.sent) + left.lent < 64:
            left.queue(MIB, CUTS["pages"])
            left.flush()
            rig.loop.call_soon(right.take)

    left.on_sent = left.on_writable = refill
    left.send_many(4, MIB)
    await rig.moved(left, right, 64)


@pressure.links(
    "fair-loop", "While a link moves much data, other tasks get their turns"
)
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    left.send_many(2, 32 * MIB)
    await _arrive_in_turns(rig, right, 2)


@pressure.lanes(
    "fair-loop", "While a lane moves much data, other tasks get their turns"
)
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.send_many(64, MIB)
    await _arrive_in_turns(rig, right, 64)


async def _arrive_in_turns(rig: AnyRig, side: Any, count: int) -> None:
    """Require that between two turns of the loop only a few wake-ups' bytes arrive."""
    most = side.received_bytes
    before = side.received_bytes

    def over() -> bool:
        return len(side.arrived) >= count or bool(side.closed)

    def rose() -> bool:
        return over() or side.received_bytes != before

    while not over():
        await rig.until(rose, "more bytes come in", every_turn=True)
        now = side.received_bytes
        require(now >= before, "received_bytes fell")
        most = max(most, now - before)
        before = now
    await rig.arrives(side, count)
    # The first flush may have moved one wake-up's bytes before the first turn.
    require(
        most <= 3 * LANE_WAKEUP_BYTES,
        f"{most} bytes arrived in one turn; LANE_WAKEUP_BYTES is {LANE_WAKEUP_BYTES}",
    )


@pressure.both(
    "fair-other", "A little data does not wait behind 64 MiB of another link or lane"
)
async def _(rig: AnyRig, busy: Any, sink: Any) -> None:
    left, right = await rig.pair()
    busy.send_many(64, MIB)
    left.send(1000)
    await rig.arrives(right, 1)
    require(
        len(sink.arrived) < 64, "the short transfer had to wait for all of the bulk"
    )
    await rig.arrives(sink, 64)


# --- pause ----------------------------------------------------------------------------

# Small frames that arrive together, and large ones that take many turns.
_SIZES: Final = (0, 10, 0, 7 * KIB, 100 * KIB, 3, 9 * KIB, 0, 2 * MIB, 1)


async def _paused(rig: LinkRig, left: LinkSide, right: LinkSide) -> bool:
    """Pause the right side and send to it; False if it cannot pause."""
    if not right.link.pausable:
        return False
    right.link.pause()
    _send_all(left)
    await rig.settle()
    require(not right.arrived, "something arrived")
    return True


def _send_all(side: LinkSide) -> None:
    for size in _SIZES:
        side.queue(size)
    side.flush()


@pause.links("before", "A paused link hands over no header until it is resumed")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    if await _paused(rig, left, right):
        right.link.resume()
        right.link.pause()  # before the link was resumed
        await rig.settle()
        require(not right.arrived, "something arrived")
        right.link.resume()
        await rig.moved(left, right, len(_SIZES))


@pause.links("each", "A link paused at a header ends that frame and begins no other")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
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
    await rig.given_back(left)


@pause.links("end", "A paused link can be aborted, and resumed afterwards")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    if await _paused(rig, left, right):
        right.abort()
        right.link.resume()
        await rig.closes(right)
        require(not right.arrived, "data arrived after abort")
        left.abort()


# --- threads --------------------------------------------------------------------------

Far = Callable[[LinkRig, LinkSide], Awaitable[None]]


@asynccontextmanager
async def _connected(rig: LinkRig, far: Far) -> AsyncIterator[LinkSide]:
    """Yield one started side of a link whose other side lives on another thread.

    That side has its own loop, and runs `far`.
    """
    listening: Future[Address] = Future()
    connected: Future[None] = Future()

    async def live() -> None:
        there = LinkRig(rig.make, rig.address, rig.timeout_s, alone=False)
        try:
            listening.set_result((await there.listen()).address)
            right = there.side("right", await there.accept())
            # If a link is reset before its connect returns, the connect fails.
            await there.until(connected.done, "the near side has connected")
            await far(there, right)
        finally:
            await there.aclose()

    def main() -> None:
        with asyncio.Runner(loop_factory=type(rig.loop)) as runner:
            runner.run(live())

    thread = start_task(asyncio.to_thread(main))
    try:
        await rig.until(lambda: listening.done() or thread.done(), "it listens")
        if thread.done():
            thread.result()
        left = rig.side("left", await rig.connect(listening.result()))
        connected.set_result(None)
        left.start()
        yield left
    finally:
        (error,) = await asyncio.gather(thread, return_exceptions=True)
    if error is not None:
        raise error


async def _echo_until_closed(rig: LinkRig, right: LinkSide) -> None:
    def echo(landing: KitLanding) -> None:
        right.send(landing.length, CUTS["pages"])

    right.keep_landings(CUTS["uneven"])
    right.on_arrival = echo
    right.start()
    await rig.closes(right)


async def _start_and_wait(rig: LinkRig, right: LinkSide) -> None:
    right.start()
    await rig.closes(right)


async def _abort_in_body(rig: LinkRig, right: LinkSide) -> None:
    right.on_arrival = lambda landing: right.abort()
    right.start()
    await rig.closes(right)


@threads.links("echo", "Frames go back and forth between two threads")
async def _(rig: LinkRig) -> None:
    async with _connected(rig, _echo_until_closed) as left:
        left.on_sent = poison
        for size in (0, 1, 5000, 300_000, 2 * MIB) * 8:
            left.send(size, CUTS["odd-pages"])
        await rig.moved(left, left, 40)
        require(left.arrived == list(range(40)), f"they arrived as {left.arrived}")
        left.close()
        await rig.closes(left)


@threads.links("abort", "abort while the other thread receives: memory is free at once")
async def _(rig: LinkRig) -> None:
    async with _connected(rig, _start_and_wait) as left:
        sent = left.send_many(8, 4 * MIB)
        await rig.until(lambda: len(left.sent) > 0, "the first frame is sent")
        left.abort()
        await rig.closes(left)
        for token in sent:
            poison(token)


@threads.links("aborted", "abort by the other thread while this one sends")
async def _(rig: LinkRig) -> None:
    async with _connected(rig, _abort_in_body) as left:
        left.send_many(32, MIB)
        await rig.closes(left)
