"""Frames and payloads arrive complete, once and, over links, in order.

The checks cover every size, every kind of memory, and every way of queueing.
"""

from __future__ import annotations

from itertools import product
from typing import Any, Final

from kvwire.limits import KIB, LANE_PAYLOADS_MAX, MIB
from kvwire_certify.conformance.check import Group, require
from kvwire_certify.conformance.content import CUTS, Cut, Memory, even, pattern, poison
from kvwire_certify.conformance.rig import AnyRig, LaneRig, LinkRig
from kvwire_certify.conformance.sides import KitLanding, LaneSide, LinkSide

frame: Group = Group("frame")
payload: Group = Group("payload")
order: Group = Group("order")


# --- frame ----------------------------------------------------------------------------

_SIZES: Final = {
    **{str(n): n for n in (1, 2, 31, 32, 33, 255, 4095, 4096, 4097)},
    "64KiB-1": 64 * KIB - 1,
    "64KiB": 64 * KIB,
    "64KiB+1": 64 * KIB + 1,
    "1MiB": MIB,
    "1MiB+1": MIB + 1,
    "3MiB+1": 3 * MIB + 1,
    "16MiB": 16 * MIB,
}


@payload.links("size", "A frame without payload arrives: {}", {"0": 0})
@payload.both("size", "A payload of {} bytes arrives, in either direction", _SIZES)
async def _(rig: AnyRig, left: Any, right: Any, size: int) -> None:
    left.send(size)
    await rig.moved(left, right, 1)
    right.send(size)
    await rig.moved(right, left, 1)


_SMALL: Final = {"0": 0, "1": 1, "4KiB": 4 * KIB, "16KiB": 16 * KIB, "64KiB": 64 * KIB}


@frame.links(
    "untokened", "Without a token, memory of {} bytes is free after flush", _SMALL
)
async def _(rig: LinkRig, left: LinkSide, right: LinkSide, size: int) -> None:
    _send_and_reuse(left, size)
    await rig.arrives(right, 20)
    await rig.settle()
    require(not left.sent, "frame_sent was called")


@frame.links(
    "untokened-full",
    "The same with {} bytes when the transport is full",
    _SMALL,
    held=True,
)
async def _(rig: LinkRig, left: LinkSide, right: LinkSide, size: int) -> None:
    left.send(16 * MIB)
    _send_and_reuse(left, size)
    right.start()
    await rig.arrives(right, 21)


_NOW: Final = {**_SMALL, "1MiB": MIB}


@frame.links(
    "now", "A frame of {} bytes that is sent in one call keeps its place", _NOW
)
async def _(rig: LinkRig, left: LinkSide, right: LinkSide, size: int) -> None:
    for cut in (None, CUTS["odd-pages"]) * 4:
        left.send_now(size, cut)
        left.queue(100)
        left.send_now(size, cut)
    await rig.moved(left, right, 24)


@frame.links("now-full", "The same when the transport is full", _NOW, held=True)
async def _(rig: LinkRig, left: LinkSide, right: LinkSide, size: int) -> None:
    left.send(16 * MIB)
    for _ in range(20):
        left.send_now(size)
    right.start()
    await rig.moved(left, right, 21)


def _send_and_reuse(left: LinkSide, size: int) -> None:
    """Send 20 payloads without a token, each overwritten as soon as it is flushed."""
    for number in range(20):
        sent = left.queue(size, CUTS["odd-pages"] if number % 2 else None, token=False)
        left.flush()
        poison(sent)


@frame.links(
    "untokened-batch",
    "Memory without a token is free after {}, for all that is queued",
    {"flush": LinkSide.flush, "close": LinkSide.close},
)
async def _(rig: LinkRig, left: LinkSide, right: LinkSide, sent_by: Any) -> None:
    right.keep_landings(CUTS["uneven"])
    queued = [left.queue(50_000, CUTS["pages"], token=False) for _ in range(40)]
    sent_by(left)
    for sent in queued:
        poison(sent)
    await rig.arrives(right, 40)


@frame.links("empty", "An empty view counts as no payload, also as a landing")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    right.keep_landings()
    left.queue(0, memory=Memory(0))
    left.queue(0, memory=Memory(0, CUTS["pages"]))
    left.flush()
    await rig.moved(left, right, 2)


@frame.links("headers", "Every bit of a header arrives")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    for bit in range(64):
        left.queue(0, number=1 << bit)
    left.queue(0, number=2**64 - 1)
    left.flush()
    await rig.arrives(right, 65)


@frame.links("read-only", "Read-only memory can be sent")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    for number in range(3):
        memory = Memory(100_000)
        memory.payload = memoryview(pattern(number, 100_000).tobytes())
        left.queue(100_000, memory=memory)
    left.flush()
    await rig.moved(left, right, 3)


@payload.both("shared", "The same memory can be sent in two payloads at the same time")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    memory = Memory(MIB)
    memory.fill(pattern(9, MIB))
    left.queue(MIB, number=9, memory=memory)
    left.queue(MIB, number=9, memory=memory)
    left.flush()
    right.take()
    await rig.moved(left, right, 2)


_KINDS: Final = {
    f"{source}-to-{destination}": (CUTS[source], CUTS[destination])
    for source, destination in product(CUTS, CUTS)
}


@payload.both("kinds", "The two ends may divide memory differently: {}", _KINDS)
async def _(
    rig: AnyRig, left: Any, right: Any, cuts: tuple[Cut | None, Cut | None]
) -> None:
    right.keep_landings(cuts[1])
    # Several, because leftovers of one payload must not disturb the next.
    for size in (200_001, 1, 100, 1_000_000):
        left.send(size, cuts[0])
    await rig.moved(left, right, 4)


_MANY: Final = {
    "20,000 into 30,000": (600_000, even(30), even(20)),
    "4 of 1 MiB into 3 MiB and 1": (4 * MIB, even(MIB), even(3 * MIB)),
}


@payload.both("fragments", "Fragments are sent into other fragments: {}", _MANY)
async def _(rig: AnyRig, left: Any, right: Any, case: tuple[int, Cut, Cut]) -> None:
    size, source, destination = case
    right.keep_landings(destination)
    left.send(size, source)
    await rig.moved(left, right, 1)


@payload.both("touching", "Fragments that are adjacent in memory keep their order")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    memory = Memory(90_000)
    memory.fill(pattern(0, 90_000))
    memory.split_in_place(9)
    left.queue(90_000, memory=memory)
    left.flush()
    right.take()
    await rig.moved(left, right, 1)


@payload.both("dropped", "A payload from {} without a destination is dropped", CUTS)
async def _(rig: AnyRig, left: Any, right: Any, cut: Cut | None) -> None:
    landed = right.keep_landings()
    right.on_arrival = poison
    land = right.land
    right.land = lambda item: None if item.number % 2 else land(item)
    left.send_many(6, 150_000, cut)
    await rig.moved(left, right, 6)
    kept = all(memory.untouched for memory in landed)
    require(kept, "the memory of an earlier payload was written")


# --- payload --------------------------------------------------------------------------


@payload.lanes("many", "The most payloads that a lane may have all arrive, each once")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for number in range(LANE_PAYLOADS_MAX):
        left.queue(1 + number * 191, CUTS["pages"] if number % 3 else None)
    left.flush()
    right.take()
    await rig.moved(left, right, LANE_PAYLOADS_MAX)
    require(
        sorted(right.arrived) == list(range(LANE_PAYLOADS_MAX)),
        "some payloads arrived twice, and some not at all",
    )


@payload.lanes("early", "An arrival may be queued before the sender flushes")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.queue_many(3, 300_000, CUTS["pages"])
    right.take()
    await rig.settle()
    left.flush()
    await rig.moved(left, right, 3)


# --- order ----------------------------------------------------------------------------

_MIXES: Final[dict[str, list[int]]] = {
    "empty": [0] * 1000,
    "small": [64] * 1000,
    "pages": [4 * KIB] * 500,
    "growing": list(range(0, 9000, 30)),
    "shrinking": list(range(9000, 0, -30)),
    "alternating": [MIB, 0, 5, 300_000] * 6,
    "large": [2 * MIB] * 8,
}


@order.links("sizes", "Frames queued together and singly arrive in order: {}", _MIXES)
async def _(rig: LinkRig, left: LinkSide, right: LinkSide, sizes: list[int]) -> None:
    for size in sizes:
        left.queue(size)
    left.flush()
    for size in sizes:
        left.send(size)
    await rig.moved(left, right, 2 * len(sizes))


@order.links("kinds", "Views, fragments and frames without token arrive in order")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    cuts = list(CUTS.values())
    right.land = lambda head: Memory(head.length, cuts[head.number * 5 % len(cuts)])
    for i in range(120):
        left.queue(i * 33_331 % 50_000 + 1, cuts[i % len(cuts)], token=i % 3 > 0)
    left.flush()
    await rig.moved(left, right, 120)


@order.both("both-ways", "Bulk in both directions at once does not deadlock")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    right.keep_landings(CUTS["uneven"])
    for side in (left, right):
        side.queue_many(8, 2 * MIB, CUTS["odd-pages"])
    for side in (left, right):
        side.flush()
    left.take()
    right.take()
    await rig.moved(left, right, 8)
    await rig.moved(right, left, 8)


@order.links("echo", "Frames sent inside body_received arrive in order")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:

    def echo(landing: KitLanding) -> None:
        right.send(landing.length)

    right.on_arrival = echo
    for size in (0, 10, 5000, 300_000) * 5:
        left.send(size)
    await rig.moved(right, left, 20)


@order.both("ping-pong", "100 messages go back and forth, each after the previous one")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    # Later, because `send` on a lane also makes the other side receive.
    right.on_arrival = lambda _: rig.loop.call_soon(right.send, 20_000)
    for count in range(1, 101):
        left.send(count * 50, CUTS["pages"])
        await rig.arrives(left, count)
    await rig.given_back(left)
    await rig.given_back(right)
