"""Whose memory it is, and when: what is of links alone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from kvwire.limits import KIB, MIB
from kvwire.testing.conformance.bench import require_collected
from kvwire.testing.conformance.check import GroupOf, require
from kvwire.testing.conformance.content import (
    CUTS,
    POISON,
    Bytes,
    Cut,
    Memory,
    pattern,
    poison,
)
from kvwire.testing.conformance.lane_side import LaneSide
from kvwire.testing.conformance.rig import AnyRig, Group, LaneGroup, LaneRig, Rig
from kvwire.testing.conformance.side import LinkSide

links, lanes = Group("memory"), LaneGroup("memory")
both: GroupOf[AnyRig] = GroupOf("memory", links, lanes)


@both.each("source", "Memory of {} is not read after it was given back", CUTS)
async def _source(rig: AnyRig, cut: Cut | None) -> None:
    left, right = await rig.pair()
    left.on_sent = poison
    left.queue_many(10, 400_000, cut)
    left.flush()
    right.take()
    await rig.moved(left, right, 10)


@both.check("source-late", "The same when the receiver takes its time")
async def _source_late(rig: AnyRig) -> None:
    left, right = await rig.held_pair()
    left.on_sent = poison
    for number in range(32):
        left.send(MIB, CUTS["pages"] if number % 2 else None)
    await rig.settle()
    right.release()
    await rig.moved(left, right, 32)


@both.pair("source-reused", "Memory is sent again and again, refilled when it may be")
async def _source_reused(rig: AnyRig, left: Any, right: Any) -> None:
    memory = Memory(300_000, CUTS["pages"])
    for number in range(20):
        memory.fill(pattern(number, 300_000))
        left.queue(300_000, number=number, memory=memory)
        left.flush()
        right.take()
        await rig.given_back(left)
    await rig.arrives(right, 20)


@both.each("destination", "Memory of {} is not written after it was filled", CUTS)
async def _destination(rig: AnyRig, cut: Cut | None) -> None:
    left, right = await rig.pair()
    landed = landing_in(right, cut)
    right.on_arrival = poison
    left.queue_many(10, 100_000)
    left.flush()
    right.take()
    await rig.arrives(right, 10)
    await rig.settle()
    require_untouched(landed, "it was filled")


@both.pair("abort-midway", "After abort and the end the receiver writes nothing")
async def _abort_midway(rig: AnyRig, left: Any, right: Any) -> None:
    landed = landing_in(right, None)
    left.send_many(6, 4 * MIB)
    await rig.until(lambda: right.received_bytes > 0, "payload arrives")
    right.abort()
    await rig.closes(right)
    for memory in landed:
        memory.poison(POISON)
    await rig.settle()
    require_untouched(landed, "the end")


@both.check("abort-sender", "An aborted sender's memory is free at the end")
async def _abort_sender(rig: AnyRig) -> None:
    left, right = await rig.held_pair()
    tokens = [left.send(MIB, CUTS["pages"]) for _ in range(32)]
    await rig.settle()
    left.abort()
    await rig.closes(left)
    for token in tokens:
        poison(token)
    # What had left before may arrive, but then as it was: each arrival is compared.
    right.release()
    await rig.ends(right)


@both.check("kept-source", "Lent memory stays alive although its sender drops it")
async def _kept_source(rig: AnyRig) -> None:
    left, right = await rig.held_pair()
    for number in range(8):
        memory = Memory(4 * MIB, CUTS["pages"] if number % 2 else None)
        memory.fill(pattern(number, 4 * MIB))
        left.queue(4 * MIB, memory=memory).memory = None
        left.flush()
        del memory
    gc.collect()
    right.release()
    await rig.arrives(right, 8)


async def _idle_after_traffic(rig: AnyRig) -> tuple[Any, Any, list[weakref.ref[Bytes]]]:
    """Make a pair that has moved payloads of all kinds, and references to these."""
    left, right = await rig.pair()
    seen: list[weakref.ref[Bytes]] = []

    def land(item: Any) -> Memory:
        memory = Memory(item.length, CUTS["pages"] if item.number % 2 else None)
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
    await rig.moved(left, right, 8)
    await rig.settle()
    return left, right, seen


@both.check("released-idle", "What is idle keeps no payload memory alive")
async def _released_idle(rig: AnyRig) -> None:
    left, right, seen = await _idle_after_traffic(rig)
    require_collected(seen, "payloads")
    require(not left.closed and not right.closed, "it closed")


@both.check("released-closed", "What has closed keeps no payload memory alive")
async def _released_closed(rig: AnyRig) -> None:
    left, right, seen = await _idle_after_traffic(rig)
    left.close()
    right.close()
    await rig.closes(left, right)
    require_collected(seen, "payloads")


@both.check("released-aborted", "What was aborted keeps no queued memory alive")
async def _released_aborted(rig: AnyRig) -> None:
    left, right = await rig.held_pair()
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
    await rig.closes(*(side for side in (right,) if side.begun))
    await rig.settle()
    require_collected(seen, "payloads")


def landing_in(side: Any, cut: Cut | None) -> list[Memory]:
    """Have a side land payloads in memory of its own; the list gets all of it."""
    landed: list[Memory] = []

    def land(item: Any) -> Memory:
        landed.append(Memory(item.length, cut))
        return landed[-1]

    side.land = land
    return landed


def require_untouched(landed: list[Memory], since: str) -> None:
    """Fail the check unless all of it is still poison."""
    whole = all(memory.is_all(POISON) for memory in landed)
    require(whole, f"a destination was written after {since}")


# --- of links alone -------------------------------------------------------------------


@links.pair("destination-reused", "All frames land in one memory, one after another")
async def _destination_reused(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    memory = Memory(300_000, CUTS["pages"])
    right.land = lambda head: memory
    left.queue_many(20, 300_000, CUTS["uneven"])
    left.flush()
    await rig.arrives(right, 20)


@links.pair("dropped", "A dropped payload is written nowhere")
async def _dropped(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    kept = Memory(MIB)
    right.land = lambda head: kept if head.number == 0 else None
    left.send(MIB)
    await rig.arrives(right, 1)
    kept.poison(POISON)
    left.send(MIB)
    await rig.arrives(right, 2)
    require(kept.is_all(POISON), "the memory of the frame before was written")


@links.pair("abort-receiver", "After abort and link_closed the receiver writes nothing")
async def _abort_receiver(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    memory = Memory(16 * MIB)
    right.land = lambda head: memory
    right.on_header = lambda head: right.abort()
    left.send(16 * MIB)
    await rig.closes(right)
    memory.poison(POISON)
    await rig.closes(left)
    await rig.settle()
    require(memory.is_all(POISON), "the landing was written after link_closed")


@links.pair("peer-abort", "When the peer aborts, memory is free at link_closed")
async def _peer_abort(rig: Rig, left: LinkSide, right: LinkSide) -> None:
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


# --- of lanes alone -------------------------------------------------------------------


@lanes.pair("abort-sender-midway", "The same when the receiver is in the middle of it")
async def _abort_sender_midway(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    tokens = [left.send(4 * MIB, CUTS["pages"]) for _ in range(6)]
    await rig.until(lambda: right.lane.received_bytes > 0, "payload arrives")
    left.abort()
    await rig.closes(left)
    for token in tokens:
        poison(token)
    await rig.ends(right)


@lanes.pair("abort-receiver", "After abort and lane_closed the receiver writes nothing")
async def _abort_receiver_lanes(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    landed = landing_in(right, None)
    left.queue_many(6, 4 * MIB)
    left.flush()
    for _ in range(6):
        right.receive(right.inbox.popleft())
    right.abort()
    await rig.closes(right)
    for memory in landed:
        memory.poison(POISON)
    left.flush()
    await rig.settle()
    require_untouched(landed, "lane_closed")
