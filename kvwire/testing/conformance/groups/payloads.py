"""Frames and payloads arrive whole, once and, over links, in order.

Of every size, from and into memory of every kind, however they are queued.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from kvwire.limits import KIB, LANE_PAYLOADS_MAX, MIB
from kvwire.testing.conformance.check import Group, require
from kvwire.testing.conformance.content import CUTS, Cut, Head, Memory, pattern, poison
from kvwire.testing.conformance.rig import AnyRig, LaneRig, Rig
from kvwire.testing.conformance.sides import KitLanding, LaneSide, LinkSide

frame: Group = Group("frame")
payload: Group = Group("payload")
order: Group = Group("order")


# --- frame ----------------------------------------------------------------------------

_SIZES = {
    **{str(n): n for n in (0, 1, 2, 31, 32, 33, 255, 4095, 4096, 4097)},
    "64KiB-1": 64 * KIB - 1,
    "64KiB": 64 * KIB,
    "64KiB+1": 64 * KIB + 1,
    "1MiB": MIB,
    "1MiB+1": MIB + 1,
    "3MiB+1": 3 * MIB + 1,
    "16MiB": 16 * MIB,
}
_LANE_SIZES = {name: size for name, size in _SIZES.items() if size}


@frame.links("size", "A frame of {} bytes of payload arrives whole", _SIZES)
@payload.lanes("size", "A payload of {} bytes arrives", _LANE_SIZES)
async def _(rig: AnyRig, left: Any, right: Any, size: int) -> None:
    left.send(size)
    await rig.moved(left, right, 1)


_SMALL = {"0": 0, "1": 1, "4KiB": 4 * KIB, "16KiB": 16 * KIB, "64KiB": 64 * KIB}


@frame.links(
    "untokened", "Without a token, memory of {} bytes is free after flush", _SMALL
)
async def _(rig: Rig, left: LinkSide, right: LinkSide, size: int) -> None:
    _send_and_reuse(left, size)
    await rig.arrives(right, 20)


@frame.links(
    "untokened-full",
    "The same of {} bytes when the transport is full",
    _SMALL,
    held=True,
)
async def _(rig: Rig, left: LinkSide, right: LinkSide, size: int) -> None:
    left.send(16 * MIB)
    _send_and_reuse(left, size)
    right.start()
    await rig.arrives(right, 21)


def _send_and_reuse(left: LinkSide, size: int) -> None:
    """Send 20 payloads without a token, each overwritten as soon as it is flushed."""
    for number in range(20):
        sent = left.queue(size, CUTS["odd-pages"] if number % 2 else None, token=False)
        left.flush()
        poison(sent)


@frame.links("untokened-batch", "Memory is free only after flush, and for all queued")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    queued = [left.queue(1000, token=False) for _ in range(100)]
    left.flush()
    for sent in queued:
        poison(sent)
    await rig.arrives(right, 100)


@frame.links("empty", "An empty view as payload, or as landing, is no payload")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.land = lambda head: Memory(head.length)
    left.queue(0, memory=Memory(0))
    left.queue(0, memory=Memory(0, CUTS["pages"]))
    left.flush()
    await rig.moved(left, right, 2)


@frame.links("headers", "Every bit of a header arrives")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for bit in range(64):
        left.queue(0, number=1 << bit)
    left.queue(0, number=2**64 - 1)
    left.flush()
    await rig.arrives(right, 65)
    require(right.arrived[:64] == [1 << bit for bit in range(64)], "numbers changed")


@frame.links("read-only", "Read-only memory can be sent")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for number in range(3):
        data = memoryview(pattern(number, 100_000).tobytes())
        header = Head(number, len(data)).encode()
        left.link.send(header, data, left.lend(number))
    left.flush()
    await rig.moved(left, right, 3)


@frame.links("shared", "One memory can be sent in two frames at once")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    memory = Memory(MIB)
    memory.fill(pattern(9, MIB))
    left.queue(MIB, number=9, memory=memory)
    left.queue(MIB, number=9, memory=memory)
    left.flush()
    await rig.moved(left, right, 2)


_KINDS = {
    f"{source}-to-{destination}": (CUTS[source], CUTS[destination])
    for source, destination in product(CUTS, CUTS)
}


@frame.links("kinds", "Payload goes from {}", _KINDS)
@payload.lanes("kinds", "Memory may be cut differently at the two ends: {}", _KINDS)
async def _(
    rig: AnyRig, left: Any, right: Any, cuts: tuple[Cut | None, Cut | None]
) -> None:
    right.land = lambda item: Memory(item.length, cuts[1])
    # More than one: what a payload leaves behind must not disturb the next.
    for size in (200_001, 1, 1_000_000):
        left.send(size, cuts[0])
    await rig.moved(left, right, 3)


@frame.links("small-kinds", "A payload of 100 bytes lands in {}", CUTS)
async def _(rig: Rig, left: LinkSide, right: LinkSide, cut: Cut | None) -> None:
    right.land = lambda head: Memory(head.length, cut)
    left.queue_many(5, 100, cut)
    left.flush()
    await rig.moved(left, right, 5)


@frame.links("dropped", "A payload from {} that lands nowhere is dropped whole", CUTS)
async def _(rig: Rig, left: LinkSide, right: LinkSide, cut: Cut | None) -> None:
    right.land = lambda head: None if head.number % 2 else Memory(head.length)
    left.queue_many(6, 150_000, cut)
    left.flush()
    await rig.moved(left, right, 6)


@frame.links("many-fragments", "20,000 fragments go into 30,000 others")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.land = lambda head: Memory(head.length, lambda total: [20] * (total // 20))
    left.send(600_000, lambda total: [30] * (total // 30))
    await rig.moved(left, right, 1)


@frame.links("large-fragments", "Fragments of 1 MiB and of 3 MiB together")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.land = lambda head: Memory(head.length, lambda total: [total - MIB, MIB])
    left.send(4 * MIB, lambda total: [MIB] * (total // MIB))
    await rig.moved(left, right, 1)


@frame.links("touching", "Fragments that touch in memory are still one after another")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    memory = Memory(90_000)
    memory.fill(pattern(0, 90_000))
    memory.split_in_place(9)
    left.queue(90_000, memory=memory)
    left.flush()
    await rig.moved(left, right, 1)


# --- payload --------------------------------------------------------------------------


@payload.lanes("back", "A payload of {} bytes arrives at the client", _LANE_SIZES)
async def _(rig: LaneRig, left: LaneSide, right: LaneSide, size: int) -> None:
    right.send(size)
    await rig.moved(right, left, 1)


@payload.lanes(
    "dropped", "A payload without a destination goes nowhere, and is counted"
)
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.land = lambda parcel: None if parcel.number % 2 else Memory(parcel.length)
    for size in (1, 100_000, 100_000, MIB, MIB):
        left.send(size, CUTS["pages"])
    await rig.moved(left, right, 5)
    require(sorted(right.arrived) == list(range(5)), f"{right.arrived} arrived")


@payload.lanes("many", "As many payloads as a lane may have arrive, each once")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for number in range(LANE_PAYLOADS_MAX):
        left.queue(1 + number * 191, CUTS["pages"] if number % 3 else None)
    left.flush()
    right.take()
    await rig.moved(left, right, LANE_PAYLOADS_MAX)
    require(
        sorted(right.arrived) == list(range(LANE_PAYLOADS_MAX)),
        "some payloads arrived twice, and some did not",
    )


@payload.lanes("early", "An arrival may be queued before the sender flushes")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.queue_many(3, 300_000, CUTS["pages"])
    right.take()
    await rig.settle()
    left.flush()
    await rig.moved(left, right, 3)


@payload.lanes("late", "Arrivals may be queued long after everything was sent")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.holding = True
    left.send_many(24, MIB, CUTS["pages"])
    await rig.settle()
    for _ in range(24):
        right.take(1)
    await rig.moved(left, right, 24)


# --- order ----------------------------------------------------------------------------

_MIXES: dict[str, list[int]] = {
    "empty": [0] * 1000,
    "small": [64] * 1000,
    "pages": [4 * KIB] * 500,
    "growing": list(range(0, 9000, 30)),
    "shrinking": list(range(9000, 0, -30)),
    "alternating": [MIB, 0, 5, 300_000] * 6,
    "large": [2 * MIB] * 8,
}


@order.links("one-flush", "Frames queued before one flush come in order: {}", _MIXES)
async def _(rig: Rig, left: LinkSide, right: LinkSide, sizes: list[int]) -> None:
    for size in sizes:
        left.queue(size)
    left.flush()
    await _all_arrive(rig, left, right, len(sizes))


@order.links("each-flushed", "Frames flushed one by one come in order: {}", _MIXES)
async def _(rig: Rig, left: LinkSide, right: LinkSide, sizes: list[int]) -> None:
    for size in sizes:
        left.send(size)
    await _all_arrive(rig, left, right, len(sizes))


@order.links("kinds", "Views, fragments and frames without token come in order")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    cuts = list(CUTS.values())
    right.land = lambda head: Memory(head.length, cuts[head.number * 5 % len(cuts)])
    for i in range(120):
        left.queue(i * 33_331 % 50_000 + 1, cuts[i % len(cuts)], token=i % 3 > 0)
    left.flush()
    await _all_arrive(rig, left, right, 120)


@order.both("both-ways", "Bulk in both directions at once does not lock up")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    right.land = lambda item: Memory(item.length, CUTS["uneven"])
    for _ in range(8):
        left.queue(2 * MIB, CUTS["odd-pages"])
        right.queue(2 * MIB, CUTS["pages"])
    left.flush()
    right.flush()
    left.take()
    right.take()
    await rig.moved(left, right, 8)
    await rig.moved(right, left, 8)


@order.links("both-ways-full", "The same when neither reads at first")
async def _(rig: Rig) -> None:
    left, right = await rig.pair(start_left=False, start_right=False)
    left.start()
    left.send_many(20, MIB)
    right.start()
    right.send_many(20, MIB)
    await _all_arrive(rig, left, right, 20)
    await _all_arrive(rig, right, left, 20)


@order.links("echo", "Frames sent from within body_received come in order")
async def _(rig: Rig, left: LinkSide, right: LinkSide) -> None:

    def echo(landing: KitLanding) -> None:
        right.queue(landing.length, number=landing.number)
        right.flush()

    right.on_arrival = echo
    for size in (0, 10, 5000, 300_000) * 5:
        left.send(size)
    await _all_arrive(rig, right, left, 20)


@order.both("ping-pong", "100 go to and fro, each after the one before")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    # Not at once: over a lane `send` has the side across receive as well.
    right.on_arrival = lambda _: rig.loop.call_soon(right.send, 20_000)
    for count in range(1, 101):
        left.send(count * 50, CUTS["pages"])
        await rig.arrives(left, count)
    await rig.given_back(left)
    await rig.given_back(right)


async def _all_arrive(
    rig: Rig, sender: LinkSide, receiver: LinkSide, count: int
) -> None:
    await rig.moved(sender, receiver, count)
    await rig.settle()
    require(
        receiver.arrived == list(range(count)),
        f"{receiver.name} got {len(receiver.arrived)} frames for {count}, or not in "
        f"order: it begins {receiver.arrived[:10]}",
    )
