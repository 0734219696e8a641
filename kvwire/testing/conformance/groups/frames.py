"""Frames of every size, and payload memory of every kind on both sides."""

from __future__ import annotations

from itertools import product

from kvwire.limits import KIB, MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import CUTS, Cut, Head, Memory, pattern, poison
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.testing.conformance.side import LinkSide

links: Group = Group("frame")

_SIZES = {
    **{str(n): n for n in (0, 1, 2, 31, 32, 33, 255, 4095, 4096, 4097)},
    "64KiB-1": 64 * KIB - 1,
    "64KiB": 64 * KIB,
    "64KiB+1": 64 * KIB + 1,
    "1MiB": MIB,
    "1MiB+1": MIB + 1,
    "16MiB": 16 * MIB,
}


@links.each("size", "A frame of {} bytes of payload arrives whole", _SIZES)
async def _size(rig: Rig, size: int) -> None:
    left, right = await rig.pair()
    left.send(size)
    await rig.moved(left, right, 1)


_SMALL = {"0": 0, "1": 1, "4KiB": 4 * KIB, "16KiB": 16 * KIB, "64KiB": 64 * KIB}


@links.each(
    "untokened", "Without a token, memory of {} bytes is free after flush", _SMALL
)
async def _untokened(rig: Rig, size: int) -> None:
    left, right = await rig.pair()
    _send_and_reuse(left, size)
    await rig.arrives(right, 20)


@links.each("untokened-full", "The same of {} bytes when the transport is full", _SMALL)
async def _untokened_full(rig: Rig, size: int) -> None:
    left, right = await rig.pair(start_right=False)
    left.send(16 * MIB)
    _send_and_reuse(left, size)
    right.start()
    await rig.arrives(right, 21)


@links.pair("untokened-cut", "The same for fragments")
async def _untokened_cut(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    _send_and_reuse(left, 40_000, CUTS["odd-pages"])
    await rig.arrives(right, 20)


def _send_and_reuse(left: LinkSide, size: int, cut: Cut | None = None) -> None:
    """Send 20 payloads without a token, each overwritten as soon as it is flushed."""
    for _ in range(20):
        sent = left.queue(size, cut, token=False)
        left.flush()
        poison(sent)


@links.pair("untokened-batch", "Memory is free only after flush, and for all queued")
async def _untokened_batch(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    queued = [left.queue(1000, token=False) for _ in range(100)]
    left.flush()
    for sent in queued:
        poison(sent)
    await rig.arrives(right, 100)


@links.pair("none", "A frame without payload, its token given back")
async def _none(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    token = left.send(0)
    await rig.moved(left, right, 1)
    require(left.sent == [token] or left.sent[0] is token, "another token came back")


@links.pair("empty", "An empty view as payload, or as landing, is no payload")
async def _empty(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.land = lambda head: Memory(head.length)
    left.queue(0, memory=Memory(0))
    left.queue(0, memory=Memory(0, CUTS["pages"]))
    left.flush()
    await rig.moved(left, right, 2)


@links.pair("headers", "Every bit of a header arrives")
async def _headers(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for bit in range(64):
        left.queue(0, number=1 << bit)
    left.queue(0, number=2**64 - 1)
    left.flush()
    await rig.arrives(right, 65)
    require(right.arrived[:64] == [1 << bit for bit in range(64)], "numbers changed")


@links.pair("read-only", "Read-only memory can be sent")
async def _read_only(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    for number in range(3):
        data = memoryview(pattern(number, 100_000).tobytes())
        header = Head(number, len(data)).encode()
        left.link.send(header, data, left.lend(number))
    left.flush()
    await rig.moved(left, right, 3)


@links.pair("shared", "One memory can be sent in two frames at once")
async def _shared(rig: Rig, left: LinkSide, right: LinkSide) -> None:
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


@links.each("kinds", "Payload goes from {}", _KINDS)
async def _kinds(rig: Rig, kinds: tuple[Cut | None, Cut | None]) -> None:
    source, destination = kinds
    left, right = await rig.pair()
    right.land = lambda head: Memory(head.length, destination)
    # Twice: what one frame leaves behind must not disturb the next.
    left.send(200_001, source)
    left.send(70_003, source)
    await rig.moved(left, right, 2)


@links.each("small-kinds", "A payload of 100 bytes lands in {}", CUTS)
async def _small_kinds(rig: Rig, cut: Cut | None) -> None:
    left, right = await rig.pair()
    right.land = lambda head: Memory(head.length, cut)
    left.queue_many(5, 100, cut)
    left.flush()
    await rig.moved(left, right, 5)


@links.each("dropped", "A payload from {} that lands nowhere is dropped whole", CUTS)
async def _dropped(rig: Rig, cut: Cut | None) -> None:
    left, right = await rig.pair()
    right.land = lambda head: None if head.number % 2 else Memory(head.length)
    left.queue_many(6, 150_000, cut)
    left.flush()
    await rig.moved(left, right, 6)


@links.pair("many-fragments", "20,000 fragments go into 30,000 others")
async def _many_fragments(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.land = lambda head: Memory(head.length, lambda total: [20] * (total // 20))
    left.send(600_000, lambda total: [30] * (total // 30))
    await rig.moved(left, right, 1)


@links.pair("large-fragments", "Fragments of 1 MiB and of 3 MiB together")
async def _large_fragments(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    right.land = lambda head: Memory(head.length, lambda total: [total - MIB, MIB])
    left.send(4 * MIB, lambda total: [MIB] * (total // MIB))
    await rig.moved(left, right, 1)


@links.pair("touching", "Fragments that touch in memory are still one after another")
async def _touching(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    memory = Memory(90_000)
    memory.fill(pattern(0, 90_000))
    memory.split_in_place(9)
    left.queue(90_000, memory=memory)
    left.flush()
    await rig.moved(left, right, 1)
