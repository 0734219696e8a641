"""Whose memory it is, and when: lent in the span, untouched outside of it.

Whoever owns memory overwrites it at the first moment it may, as an engine that reuses a
KV block does. What then arrives wrong, or is overwritten again, was touched too late.
"""

from __future__ import annotations

import gc
import weakref

from kvwire.limits import KIB, MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import CUTS, Bytes, Cut, Head, Memory, pattern
from kvwire.testing.conformance.growth import require_collected
from kvwire.testing.conformance.poison import POISON, poison
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.testing.conformance.side import LinkSide

group: Group = Group("memory")


@group.each("source", "Memory of {} is not read after frame_sent", CUTS)
async def _source(rig: Rig, cut: Cut | None) -> None:
    left, right = await rig.pair()
    left.on_sent = poison
    for _ in range(10):
        left.queue(400_000, cut)
    left.flush()
    await rig.arrives(right, 10)
    await rig.given_back(left)


@group.each("destination", "Memory of {} is not written after body_received", CUTS)
async def _destination(rig: Rig, cut: Cut | None) -> None:
    left, right = await rig.pair()
    landed: list[Memory] = []

    def land(head: Head) -> Memory:
        landed.append(Memory(head.length, cut))
        return landed[-1]

    right.land = land
    right.on_body = poison
    for _ in range(10):
        left.queue(100_000)
    left.flush()
    await rig.arrives(right, 10)
    await rig.settle()
    whole = all(memory.is_all(POISON) for memory in landed)
    require(whole, "the destination was written after body_received")


@group.check("source-full", "Memory that waits in a queue is not given back too early")
async def _source_full(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    left.on_sent = poison
    for _ in range(32):
        left.send(MIB)
    await rig.settle()
    right.start()
    await rig.arrives(right, 32)
    await rig.given_back(left)


@group.check("source-reused", "Memory is sent again and again, refilled at frame_sent")
async def _source_reused(rig: Rig) -> None:
    left, right = await rig.pair()
    memory = Memory(300_000, CUTS["pages"])
    for number in range(20):
        memory.fill(pattern(number, 300_000))
        left.queue(300_000, number=number, memory=memory)
        left.flush()
        await rig.given_back(left)
    await rig.arrives(right, 20)


@group.check("destination-reused", "All frames land in one memory, one after another")
async def _destination_reused(rig: Rig) -> None:
    left, right = await rig.pair()
    memory = Memory(300_000, CUTS["pages"])
    right.land = lambda head: memory
    for _ in range(20):
        left.queue(300_000, CUTS["uneven"])
    left.flush()
    await rig.arrives(right, 20)


@group.check("dropped", "A dropped payload is written nowhere")
async def _dropped(rig: Rig) -> None:
    left, right = await rig.pair()
    kept = Memory(MIB)
    right.land = lambda head: kept if head.number == 0 else None
    left.send(MIB)
    await rig.arrives(right, 1)
    kept.poison(POISON)
    left.send(MIB)
    await rig.arrives(right, 2)
    require(kept.is_all(POISON), "the memory of the frame before was written")


@group.check(
    "abort-receiver", "After abort and link_closed the receiver writes nothing"
)
async def _abort_receiver(rig: Rig) -> None:
    left, right = await rig.pair()
    memory = Memory(16 * MIB)
    right.land = lambda head: memory
    right.on_header = lambda head: right.abort()
    left.send(16 * MIB)
    await rig.closes(right)
    memory.poison(POISON)
    await rig.closes(left)
    await rig.settle()
    require(memory.is_all(POISON), "the landing was written after link_closed")


@group.check("abort-midway", "The same when part of the payload is already there")
async def _abort_midway(rig: Rig) -> None:
    left, right = await rig.pair()
    memory = Memory(16 * MIB)
    right.land = lambda head: memory
    left.send(16 * MIB)
    await rig.until(lambda: right.link.received_bytes > MIB, "payload arrives")
    right.abort()
    await rig.closes(right)
    memory.poison(POISON)
    await rig.settle()
    require(memory.is_all(POISON), "the landing was written after link_closed")


@group.check("abort-sender", "After abort and link_closed the sender reads nothing")
async def _abort_sender(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    sent = [left.send(MIB) for _ in range(32)]
    left.abort()
    await rig.closes(left)
    for token in sent:
        poison(token)
    right.start()
    # What had left before may arrive, but then as it was.
    await rig.closes(right)


@group.check("peer-abort", "When the peer aborts, memory is free at link_closed")
async def _peer_abort(rig: Rig) -> None:
    left, right = await rig.pair()
    memory = Memory(16 * MIB)
    right.land = lambda head: memory
    left.send(16 * MIB)
    await rig.until(lambda: right.link.received_bytes > MIB, "payload arrives")
    left.abort()
    await rig.closes(right)
    memory.poison(POISON)
    await rig.closes(left)
    await rig.settle()
    require(memory.is_all(POISON), "the landing was written after link_closed")


@group.check("kept-source", "Lent memory stays alive although the sender drops it")
async def _kept_source(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    for number in range(8):
        memory = Memory(4 * MIB, CUTS["pages"] if number % 2 else None)
        memory.fill(pattern(number, 4 * MIB))
        header = Head(number, 4 * MIB).encode()
        left.link.send(header, memory.payload, left.lend(number))
        left.flush()
        del memory
    gc.collect()
    right.start()
    await rig.arrives(right, 8)


async def _idle_after_traffic(
    rig: Rig,
) -> tuple[LinkSide, LinkSide, list[weakref.ref[Bytes]]]:
    """A pair over which frames of all kinds went, and references to their memory."""
    left, right = await rig.pair()
    seen: list[weakref.ref[Bytes]] = []

    def land(head: Head) -> Memory:
        memory = Memory(head.length, CUTS["pages"] if head.number % 2 else None)
        seen.append(memory.alive)
        return memory

    right.land = land
    for number in range(8):
        memory = Memory(200 * KIB, CUTS["uneven"] if number % 3 else None)
        memory.fill(pattern(number, 200 * KIB))
        seen.append(memory.alive)
        left.queue(200 * KIB, memory=memory)
        del memory
    left.flush()
    await rig.arrives(right, 8)
    await rig.given_back(left)
    await rig.settle()
    return left, right, seen


@group.check("released-idle", "An idle link keeps no payload memory alive")
async def _released_idle(rig: Rig) -> None:
    left, right, seen = await _idle_after_traffic(rig)
    require_collected(seen, "payloads")
    require(not left.closed and not right.closed, "a link closed")


@group.check("released-closed", "A closed link keeps no payload memory alive")
async def _released_closed(rig: Rig) -> None:
    left, right, seen = await _idle_after_traffic(rig)
    left.close()
    await rig.closes(left, right)
    require_collected(seen, "payloads")


@group.check("released-aborted", "An aborted link keeps no queued memory alive")
async def _released_aborted(rig: Rig) -> None:
    left, right = await rig.pair(start_right=False)
    seen = []
    for number in range(16):
        memory = Memory(4 * MIB, CUTS["pages"] if number % 2 else None)
        seen.append(memory.alive)
        left.queue(4 * MIB, memory=memory)
        left.flush()
        del memory
    left.abort()
    await rig.closes(left)
    left.forget()
    right.abort()
    await rig.settle()
    require_collected(seen, "payloads")
