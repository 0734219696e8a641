"""Whose memory it is, and when: lent in the span, untouched outside of it.

Whoever owns memory overwrites it at the first moment it may, as an engine that reuses a
KV block does. What then arrives wrong, or is overwritten again, was touched too late.
"""

from __future__ import annotations

import gc
import weakref

from kvwire.limits import KIB, MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import CUTS, Bytes, Cut, Memory, pattern
from kvwire.testing.conformance.growth import require_collected
from kvwire.testing.conformance.lanes.rig import LaneGroup, LaneRig
from kvwire.testing.conformance.lanes.side import LaneSide, Parcel
from kvwire.testing.conformance.poison import POISON, poison

group: LaneGroup = LaneGroup("memory")


@group.each("source", "Memory of {} is not read after payload_sent", CUTS)
async def _source(rig: LaneRig, cut: Cut | None) -> None:
    left, right = await rig.pair()
    left.on_sent = poison
    for _ in range(10):
        left.send(400_000, cut)
    await rig.arrives(right, 10)
    await rig.given_back(left)


@group.check("source-late", "The same when the receiver takes its time")
async def _source_late(rig: LaneRig) -> None:
    left, right = await rig.pair()
    right.holding = True
    left.on_sent = poison
    for number in range(24):
        left.send(MIB, CUTS["pages"] if number % 2 else None)
    await rig.settle()
    right.take()
    await rig.arrives(right, 24)
    await rig.given_back(left)


@group.check("source-reused", "Memory is sent again and again, refilled when it may be")
async def _source_reused(rig: LaneRig) -> None:
    left, right = await rig.pair()
    memory = Memory(300_000, CUTS["pages"])
    for number in range(20):
        memory.fill(pattern(number, 300_000))
        left.queue(300_000, number=number, memory=memory)
        left.flush()
        right.take()
        await rig.given_back(left)
    await rig.arrives(right, 20)


@group.each("destination", "Memory of {} is not written after payload_received", CUTS)
async def _destination(rig: LaneRig, cut: Cut | None) -> None:
    left, right = await rig.pair()
    landed: list[Memory] = []

    def land(parcel: Parcel) -> Memory:
        landed.append(Memory(parcel.length, cut))
        return landed[-1]

    right.land = land
    right.on_received = poison
    for _ in range(10):
        left.send(100_000)
    await rig.arrives(right, 10)
    await rig.settle()
    whole = all(memory.is_all(POISON) for memory in landed)
    require(whole, "the destination was written after payload_received")


@group.check("abort-sender", "An aborted sender's memory is free at lane_closed")
async def _abort_sender(rig: LaneRig) -> None:
    left, right = await rig.pair()
    right.holding = True
    tokens = [left.send(MIB, CUTS["pages"]) for _ in range(24)]
    await rig.settle()
    left.abort()
    await rig.closes(left)
    for token in tokens:
        poison(token)
    # What had left before may arrive, but then as it was: each arrival is compared.
    right.take()
    await rig.ends(right)


@group.check("abort-sender-midway", "The same when the receiver is in the middle of it")
async def _abort_sender_midway(rig: LaneRig) -> None:
    left, right = await rig.pair()
    tokens = [left.send(4 * MIB, CUTS["pages"]) for _ in range(6)]
    await rig.until(lambda: right.lane.received_bytes > 0, "payload arrives")
    left.abort()
    await rig.closes(left)
    for token in tokens:
        poison(token)
    await rig.ends(right)


@group.check(
    "abort-receiver", "After abort and lane_closed the receiver writes nothing"
)
async def _abort_receiver(rig: LaneRig) -> None:
    left, right = await rig.pair()
    landed: list[Memory] = []

    def land(parcel: Parcel) -> Memory:
        landed.append(Memory(parcel.length))
        return landed[-1]

    right.land = land
    for _ in range(6):
        left.queue(4 * MIB)
    left.flush()
    for _ in range(6):
        right.receive(right.inbox.popleft())
    right.abort()
    await rig.closes(right)
    for memory in landed:
        memory.poison(POISON)
    left.flush()
    await rig.settle()
    whole = all(memory.is_all(POISON) for memory in landed)
    require(whole, "a landing was written after lane_closed")


@group.check("abort-midway", "The same when part of the payloads is already there")
async def _abort_midway(rig: LaneRig) -> None:
    left, right = await rig.pair()
    waiting: list[Memory] = []

    def land(parcel: Parcel) -> Memory:
        waiting.append(Memory(parcel.length))
        return waiting[-1]

    right.land = land
    for _ in range(6):
        left.send(4 * MIB)
    await rig.until(lambda: right.lane.received_bytes > 0, "payload arrives")
    right.abort()
    await rig.closes(right)
    for memory in waiting:
        memory.poison(POISON)
    await rig.settle()
    whole = all(memory.is_all(POISON) for memory in waiting)
    require(whole, "a landing was written after lane_closed")


@group.check("kept-source", "Lent memory stays alive although its sender drops it")
async def _kept_source(rig: LaneRig) -> None:
    left, right = await rig.pair()
    right.holding = True
    for number in range(8):
        memory = Memory(2 * MIB, CUTS["pages"] if number % 2 else None)
        memory.fill(pattern(number, 2 * MIB))
        left.queue(2 * MIB, memory=memory).memory = None
        left.flush()
        del memory
    gc.collect()
    right.take()
    await rig.arrives(right, 8)


async def _idle_after_traffic(
    rig: LaneRig,
) -> tuple[LaneSide, LaneSide, list[weakref.ref[Bytes]]]:
    """A lane over which payloads of all kinds went, and references to their memory."""
    left, right = await rig.pair()
    seen: list[weakref.ref[Bytes]] = []

    def land(parcel: Parcel) -> Memory:
        memory = Memory(parcel.length, CUTS["pages"] if parcel.number % 2 else None)
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
    right.take()
    await rig.arrives(right, 8)
    await rig.given_back(left)
    await rig.settle()
    return left, right, seen


@group.check("released-idle", "An idle lane keeps no payload memory alive")
async def _released_idle(rig: LaneRig) -> None:
    left, right, seen = await _idle_after_traffic(rig)
    require_collected(seen, "payloads")
    require(not left.closed and not right.closed, "a lane closed")


@group.check("released-closed", "A closed lane keeps no payload memory alive")
async def _released_closed(rig: LaneRig) -> None:
    left, right, seen = await _idle_after_traffic(rig)
    left.close()
    right.close()
    await rig.closes(left, right)
    require_collected(seen, "payloads")


@group.check("released-aborted", "An aborted lane keeps no queued memory alive")
async def _released_aborted(rig: LaneRig) -> None:
    left, right = await rig.pair()
    right.holding = True
    seen = []
    for number in range(12):
        memory = Memory(4 * MIB, CUTS["pages"] if number % 2 else None)
        seen.append(memory.alive)
        left.queue(4 * MIB, memory=memory)
        left.flush()
        del memory
    left.abort()
    await rig.closes(left)
    left.forget()
    right.abort()
    await rig.closes(right)
    await rig.settle()
    require_collected(seen, "payloads")
