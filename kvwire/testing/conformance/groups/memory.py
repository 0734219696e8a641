"""Whose memory it is, and when: what is of links alone."""

from __future__ import annotations

from kvwire.limits import MIB
from kvwire.testing.conformance.check import require
from kvwire.testing.conformance.content import CUTS, Memory
from kvwire.testing.conformance.poison import POISON
from kvwire.testing.conformance.rig import Group, Rig
from kvwire.testing.conformance.shared import memory as shared
from kvwire.testing.conformance.side import LinkSide

group: Group = Group("memory")
group.include(shared.group)


@group.pair("destination-reused", "All frames land in one memory, one after another")
async def _destination_reused(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    memory = Memory(300_000, CUTS["pages"])
    right.land = lambda head: memory
    left.queue_many(20, 300_000, CUTS["uneven"])
    left.flush()
    await rig.arrives(right, 20)


@group.pair("dropped", "A dropped payload is written nowhere")
async def _dropped(rig: Rig, left: LinkSide, right: LinkSide) -> None:
    kept = Memory(MIB)
    right.land = lambda head: kept if head.number == 0 else None
    left.send(MIB)
    await rig.arrives(right, 1)
    kept.poison(POISON)
    left.send(MIB)
    await rig.arrives(right, 2)
    require(kept.is_all(POISON), "the memory of the frame before was written")


@group.pair("abort-receiver", "After abort and link_closed the receiver writes nothing")
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


@group.pair("peer-abort", "When the peer aborts, memory is free at link_closed")
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
