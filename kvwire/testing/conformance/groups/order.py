"""Frames come once, in order, however they are queued, in both directions at once."""

from __future__ import annotations

from kvwire.limits import KIB, MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import CUTS, Memory
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.testing.conformance.side import KitLanding, LinkSide

links: Group = Group("order")

_MIXES: dict[str, list[int]] = {
    "empty": [0] * 1000,
    "small": [64] * 1000,
    "pages": [4 * KIB] * 500,
    "growing": list(range(0, 9000, 30)),
    "shrinking": list(range(9000, 0, -30)),
    "alternating": [MIB, 0, 5, 300_000] * 6,
    "large": [2 * MIB] * 8,
}


@links.each("one-flush", "Frames queued before one flush come in order: {}", _MIXES)
async def _one_flush(rig: Rig, sizes: list[int]) -> None:
    left, right = await rig.pair()
    for size in sizes:
        left.queue(size)
    left.flush()
    await _all_arrive(rig, left, right, len(sizes))


@links.each("each-flushed", "Frames flushed one by one come in order: {}", _MIXES)
async def _each_flushed(rig: Rig, sizes: list[int]) -> None:
    left, right = await rig.pair()
    for size in sizes:
        left.send(size)
    await _all_arrive(rig, left, right, len(sizes))


@links.pair("kinds", "Views, fragments and frames without token come in order")
async def _kinds(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    cuts = list(CUTS.values())
    right.land = lambda head: Memory(head.length, cuts[head.number * 5 % len(cuts)])
    for i in range(120):
        left.queue(i * 33_331 % 50_000 + 1, cuts[i % len(cuts)], token=i % 3 > 0)
    left.flush()
    await _all_arrive(rig, left, right, 120)


@links.pair("thousands", "3,000 small frames at once come in order")
async def _thousands(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for i in range(3000):
        left.queue(i % 7, token=i % 100 == 0)
    left.flush()
    await _all_arrive(rig, left, right, 3000)


@links.pair("both-ways", "Bulk in both directions at once does not lock up")
async def _both_ways(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for _ in range(8):
        left.queue(2 * MIB)
        right.queue(2 * MIB)
    left.flush()
    right.flush()
    await _all_arrive(rig, left, right, 8)
    await _all_arrive(rig, right, left, 8)


@links.pair("both-ways-cut", "The same with fragments on both sides")
async def _both_ways_cut(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.land = lambda head: Memory(head.length, CUTS["uneven"])
    left.land = lambda head: Memory(head.length, CUTS["pages"])
    for _ in range(4):
        left.queue(MIB, CUTS["odd-pages"])
        right.queue(MIB, CUTS["thousands"])
    left.flush()
    right.flush()
    await _all_arrive(rig, left, right, 4)
    await _all_arrive(rig, right, left, 4)


@links.check("both-ways-full", "The same when neither reads at first")
async def _both_ways_full(rig: Rig) -> None:
    left, right = await rig.pair(start_left=False, start_right=False)
    left.start()
    left.send_many(20, MIB)
    right.start()
    right.send_many(20, MIB)
    await _all_arrive(rig, left, right, 20)
    await _all_arrive(rig, right, left, 20)


@links.pair("echo", "Frames sent from within body_received come in order")
async def _echo(rig: Rig, left: LinkSide, right: LinkSide) -> None:

    def echo(landing: KitLanding) -> None:
        right.queue(landing.head.length, number=landing.head.number)
        right.flush()

    right.on_arrival = echo
    for size in (0, 10, 5000, 300_000) * 5:
        left.send(size)
    await _all_arrive(rig, right, left, 20)


@links.pair("ping-pong", "200 frames go to and fro, each after the one before")
async def _ping_pong(rig: Rig, left: LinkSide, right: LinkSide) -> None:

    def echo(landing: KitLanding) -> None:
        right.send(landing.head.length)

    right.on_arrival = echo
    for i in range(200):
        left.send(i * 50)
        await rig.arrives(left, i + 1)
    await _all_arrive(rig, right, left, 200)


@links.pair("sent-chain", "Frames sent from within frame_sent come in order")
async def _sent_chain(rig: Rig, left: LinkSide, right: LinkSide) -> None:

    def more(_: object) -> None:
        if len(left.sent) < 50:
            left.queue(20_000)

    left.on_sent = more
    left.send(20_000)
    for count in range(1, 51):
        await rig.reaches(lambda: len(left.sent), count, "calls of frame_sent")
        left.flush()
    await _all_arrive(rig, left, right, 50)


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
