"""Payloads arrive whole and once, whatever their size and however memory is cut."""

from __future__ import annotations

from kvwire.limits import KIB, LANE_PAYLOADS_MAX, MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import CUTS, Cut, Memory
from kvwire.testing.conformance.lane_side import LaneSide
from kvwire.testing.conformance.rig import LaneGroup, LaneRig

lanes: LaneGroup = LaneGroup("payload")

_SIZES = {
    "1": 1,
    "33": 33,
    "4095": 4095,
    "4096": 4096,
    "64KiB": 64 * KIB,
    "1MiB": MIB,
    "3MiB+1": 3 * MIB + 1,
    "16MiB": 16 * MIB,
}
_KINDS: dict[str, tuple[Cut | None, Cut | None]] = {
    f"{source}-to-{destination}": (CUTS[source], CUTS[destination])
    for source, destination in (
        ("view", "view"),
        ("view", "pages"),
        ("view", "thousands"),
        ("one-fragment", "view"),
        ("pages", "pages"),
        ("pages", "odd-pages"),
        ("pages", "uneven"),
        ("odd-pages", "view"),
        ("uneven", "pages"),
        ("uneven", "uneven"),
        ("thousands", "view"),
        ("thousands", "uneven"),
        ("thousands", "thousands"),
    )
}


@lanes.each("size", "A payload of {} bytes arrives", _SIZES)
async def _size(rig: LaneRig, size: int) -> None:
    left, right = await rig.pair()
    left.send(size)
    await rig.moved(left, right, 1)


@lanes.each("back", "A payload of {} bytes arrives at the client", _SIZES)
async def _back(rig: LaneRig, size: int) -> None:
    left, right = await rig.pair()
    right.send(size)
    await rig.moved(right, left, 1)


@lanes.each("kinds", "Memory may be cut differently at the two ends: {}", _KINDS)
async def _kinds(rig: LaneRig, cuts: tuple[Cut | None, Cut | None]) -> None:
    left, right = await rig.pair()
    right.land = lambda parcel: Memory(parcel.length, cuts[1])
    for size in (300_000, 1, 1_000_000):
        left.send(size, cuts[0])
    await rig.moved(left, right, 3)


@lanes.each("chunk", "16 MiB arrive from {} into the same", CUTS)
async def _chunk(rig: LaneRig, cut: Cut | None) -> None:
    left, right = await rig.pair()
    right.land = lambda parcel: Memory(parcel.length, cut)
    left.send(16 * MIB, cut)
    await rig.moved(left, right, 1)


@lanes.pair("dropped", "A payload without a destination goes nowhere, and is counted")
async def _dropped(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.land = lambda parcel: None if parcel.number % 2 else Memory(parcel.length)
    for size in (1, 100_000, 100_000, MIB, MIB):
        left.send(size, CUTS["pages"])
    await rig.moved(left, right, 5)
    require(sorted(right.arrived) == list(range(5)), f"{right.arrived} arrived")


@lanes.pair("many", "As many payloads as a lane may have arrive, each once")
async def _many(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for number in range(LANE_PAYLOADS_MAX):
        left.queue(1 + number * 191, CUTS["pages"] if number % 3 else None)
    left.flush()
    right.take()
    await rig.moved(left, right, LANE_PAYLOADS_MAX)
    require(
        sorted(right.arrived) == list(range(LANE_PAYLOADS_MAX)),
        "some payloads arrived twice, and some did not",
    )


@lanes.pair("large-many", "64 MiB in chunks arrive, all queued at once")
async def _large_many(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.queue_many(64, MIB, CUTS["pages"])
    left.flush()
    right.take()
    await rig.moved(left, right, 64)


@lanes.pair("both-ways", "Payloads go both ways at once")
async def _both_ways(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for _ in range(16):
        left.send(MIB, CUTS["pages"])
        right.send(MIB, CUTS["odd-pages"])
    await rig.arrives(right, 16)
    await rig.arrives(left, 16)
    await rig.given_back(left)
    await rig.given_back(right)


@lanes.pair("early", "An arrival may be queued before the sender flushes")
async def _early(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    left.queue_many(3, 300_000, CUTS["pages"])
    right.take()
    await rig.settle()
    left.flush()
    await rig.moved(left, right, 3)


@lanes.pair("late", "Arrivals may be queued long after everything was sent")
async def _late(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    right.holding = True
    left.send_many(24, MIB, CUTS["pages"])
    await rig.settle()
    for _ in range(24):
        right.take(1)
    await rig.moved(left, right, 24)


@lanes.pair("in-turn", "One payload after another, each sent when the last arrived")
async def _in_turn(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    for count in range(1, 41):
        left.send(20_000 + count, CUTS["pages"])
        await rig.moved(left, right, count)


@lanes.pair("ping-pong", "A payload is answered from within payload_received")
async def _ping_pong(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:

    def answer(_: object) -> None:
        # `send` has the side across receive as well, which no callback may do.
        rig.loop.call_soon(right.send, 50_000)

    def ask_again(_: object) -> None:
        if len(left.arrived) < 20:
            rig.loop.call_soon(left.send, 50_000)

    right.on_arrival, left.on_arrival = answer, ask_again
    left.send(50_000)
    await rig.arrives(left, 20)
