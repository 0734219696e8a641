"""The ownership of memory at each moment, and leaks.

Every check looks for descriptors, tasks and errors that it left behind. The leak checks
repeat operations that might leave a little each time, and compare counts.

A descriptor that names the wrong memory of the peer cannot be distinguished from a
right one, since the peer chooses what it sends. The requirement is that this side
raises only ProtocolError and writes only to the landing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import operator
import random
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Final

from kvwire.errors import BackendUnavailable, ProtocolError
from kvwire.limits import DESCRIPTOR_BYTES_MAX, MIB
from kvwire_certify.conformance.check import CheckFailed, Group, require
from kvwire_certify.conformance.content import (
    CUTS,
    Bytes,
    Cut,
    Memory,
    pattern,
    poison,
)
from kvwire_certify.conformance.rig import (
    AnyRig,
    LaneRig,
    LinkRig,
    open_descriptors,
    require_collected,
)
from kvwire_certify.conformance.sides import LaneSide, LinkSide

memory: Group = Group("memory")
leak: Group = Group("leak")
descriptor: Group = Group("descriptor")


# --- memory ---------------------------------------------------------------------------


@memory.both("source", "Memory of {} is not read after it was given back", CUTS)
async def _(rig: AnyRig, left: Any, right: Any, cut: Cut | None) -> None:
    left.on_sent = poison
    left.send_many(10, 400_000, cut)
    await rig.moved(left, right, 10)


@memory.both("source-late", "The same if the receiver is slow", held=True)
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    left.on_sent = poison
    for number in range(32):
        left.send(MIB, CUTS["pages"] if number % 2 else None)
    await rig.settle()
    right.release()
    await rig.moved(left, right, 32)


@memory.both("destination", "Memory of {} is not written after it was filled", CUTS)
async def _(rig: AnyRig, left: Any, right: Any, cut: Cut | None) -> None:
    landed = right.keep_landings(cut)
    right.on_arrival = poison
    left.send_many(10, 100_000)
    await rig.arrives(right, 10)
    await _require_untouched(rig, landed, "it was filled")


@memory.both("abort-midway", "After abort and the end, the receiver writes nothing")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    landed = right.keep_landings()
    left.send_many(6, 4 * MIB)
    await rig.until(lambda: right.received_bytes > 0, "payload arrives")
    right.abort()
    await rig.closes(right)
    await _require_untouched(rig, landed, "the end")


@memory.links("abort-receiver", "After abort, no frame that was requested is written")
async def _(rig: LinkRig, left: LinkSide, right: LinkSide) -> None:
    landed = right.keep_landings()
    right.on_header = lambda head: right.abort()
    left.send(16 * MIB)
    await rig.closes(right)
    await _require_untouched(rig, landed, "link_closed")


@memory.lanes("abort-receiver", "After abort, no payload that was expected is written")
async def _(rig: LaneRig, left: LaneSide, right: LaneSide) -> None:
    landed = right.keep_landings()
    left.queue_many(6, 4 * MIB)
    left.flush()
    for _ in range(6):
        right.receive()
    right.abort()
    await rig.closes(right)
    left.flush()
    await _require_untouched(rig, landed, "lane_closed")


@memory.both("peer-abort", "If the peer aborts, both sides' memory is free at the end")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    landed = right.keep_landings()
    tokens = left.send_many(6, 4 * MIB, CUTS["pages"])
    await rig.until(lambda: right.received_bytes > MIB, "payload arrives")
    left.abort()
    await rig.closes(left)
    for token in tokens:
        poison(token)
    # Payload sent before the abort may still arrive, but unchanged: each arrival is
    # compared.
    await rig.rests(right)
    await _require_untouched(rig, landed, "the end")


@memory.both("abort-sender", "An aborted sender's memory is free at the end", held=True)
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    tokens = [left.send(MIB, CUTS["pages"]) for _ in range(32)]
    await rig.settle()
    left.abort()
    await rig.closes(left)
    for token in tokens:
        poison(token)
    right.release()
    await rig.rests(right)


async def _require_untouched(rig: AnyRig, landed: list[Memory], since: str) -> None:
    """Fail the check if destinations are written from now on."""
    for memory in landed:
        memory.poison()
    await rig.settle()
    whole = all(memory.untouched for memory in landed)
    require(whole, f"a destination was written after {since}")


@memory.both(
    "kept-source", "Lent memory stays alive even if its sender drops it", held=True
)
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    _send_and_drop(left, 8)
    gc.collect()
    right.release()
    await rig.arrives(right, 8)


@memory.both("released-idle", "An idle link or lane keeps no payload memory alive")
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    seen: list[weakref.ref[Bytes]] = []

    def land(item: Any) -> Memory:
        memory = Memory(item.length, CUTS["pages"] if item.number % 2 else None)
        seen.append(memory.alive)
        return memory

    right.land = land
    seen += _send_and_drop(left, 8)
    right.take()
    await rig.moved(left, right, 8)
    await rig.settle()
    require_collected(seen, "payloads")
    require(not left.closed and not right.closed, "it closed")


@memory.both(
    "released-aborted",
    "An aborted link or lane keeps no queued memory alive",
    held=True,
)
async def _(rig: AnyRig, left: Any, right: Any) -> None:
    seen = _send_and_drop(left, 16)
    left.abort()
    await rig.closes(left)
    left.forget()
    right.abort()
    await rig.closes(*(side for side in (right,) if side.begun))
    await rig.settle()
    require_collected(seen, "payloads")


def _send_and_drop(left: Any, count: int) -> list[weakref.ref[Bytes]]:
    """Send payloads and drop all references; return weak references to detect leaks."""
    seen = []
    for number in range(count):
        memory = Memory(4 * MIB, CUTS["pages"] if number % 2 else None)
        memory.fill(pattern(number, 4 * MIB))
        seen.append(memory.alive)
        left.queue(4 * MIB, memory=memory).memory = None
        left.flush()
    return seen


# --- leak -----------------------------------------------------------------------------


async def _exchange_and_close(rig: AnyRig) -> None:
    left, right = await rig.pair()
    left.send(100_000)
    await rig.arrives(right, 1)
    left.close()
    right.close()
    await rig.closes(left, right)


@leak.both(
    "collected", "An ended link or lane can be garbage-collected, with its handler"
)
async def _(rig: AnyRig) -> None:
    await rig.pair()
    await _exchange_and_close(rig)
    left, right = rig.sides[-2:]
    await rig.settle()
    alive = [weakref.ref(side) for side in (left, right)]
    rig.forget(left, right)
    del left, right
    await rig.settle()
    require_collected(alive, "handlers")


Cycle = Callable[[Any], Awaitable[None]]


async def _abort_midway(rig: AnyRig) -> None:
    left, right = await rig.pair()
    left.send_many(8, MIB)
    right.abort()
    await rig.closes(right)
    await rig.rests(left)


async def _never_start(rig: LinkRig) -> None:
    left, right = await rig.pair(start_left=False, start_right=False)
    left.abort()
    right.close()


async def _listen_and_close(rig: LinkRig) -> None:
    await rig.unlisten(await rig.listen())


async def _refused_link(rig: LinkRig) -> None:
    listener = await rig.listen()
    await rig.unlisten(listener)
    with contextlib.suppress(OSError):
        (await rig.connect(listener.address)).abort()


async def _unaccepted(rig: LinkRig) -> None:
    listener = await rig.listen(accept=lambda link: link.abort())
    # The link may be aborted before the connect that created it returns.
    with contextlib.suppress(OSError):
        await rig.connect(listener.address)
    await rig.settle()
    rig.abort_all()
    await rig.unlisten(listener)


async def _never_join(rig: LaneRig) -> None:
    left, right = rig.prepare()
    left.abort()
    right.abort()
    await rig.settle()


async def _refused_lane(rig: LaneRig) -> None:
    _, right = rig.prepare()
    with contextlib.suppress(BackendUnavailable):
        await rig.within(right.join(b"no bootstrap"), "join")
    await rig.settle()
    right.abort()


_WAYS: dict[str, Cycle] = {"closed": _exchange_and_close, "aborted": _abort_midway}
_LINK_WAYS: dict[str, Cycle] = {
    "unstarted": _never_start,
    "listened": _listen_and_close,
    "refused": _refused_link,
    "unwanted": _unaccepted,
}
_LANE_WAYS: dict[str, Cycle] = {"unjoined": _never_join, "refused": _refused_lane}


@leak.both("cycles", "20 links or lanes that end this way leave nothing: {}", _WAYS)
@leak.links("cycles", "20 links that end this way leave nothing: {}", _LINK_WAYS)
@leak.lanes("cycles", "20 lanes that end this way leave nothing: {}", _LANE_WAYS)
async def _(rig: AnyRig, cycle: Cycle) -> None:

    async def run() -> None:
        await cycle(rig)
        for side in rig.sides:
            side.abort()
        await rig.closes(*(side for side in rig.sides if side.begun))
        rig.forget(*rig.sides)
        await rig.settle()

    # Caches may fill once, but a leak grows with every cycle, or every fifth.
    await run()
    before = _counts()
    for _ in range(20):
        await run()
    gc.collect()
    for what, now in _counts().items():
        was = before[what]
        require(now <= was + 3, f"{was} {what} have grown to {now}")


def _counts() -> dict[str, int]:
    """Count the resources that may leak."""
    return {
        "descriptors": len(open_descriptors()),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
    }


# --- descriptor -----------------------------------------------------------------------

_NBYTES: Final = 100_000
_WRONG: Final[dict[str, Callable[[bytes], bytes]]] = {
    "one-byte-more": lambda descriptor: descriptor + b"\x00",
    "too-long": lambda descriptor: descriptor + bytes(DESCRIPTOR_BYTES_MAX),
    "doubled": lambda descriptor: descriptor * 2 or b"\x01",
    "of-ones": lambda descriptor: b"\xff" * (len(descriptor) + 1),
}
_KINDS: Final[dict[str, Cut | None]] = {
    name: CUTS[name] for name in ("view", "pages", "uneven")
}


@descriptor.lanes(
    "refused", "A descriptor that no lane would make is refused: {}", _WRONG
)
async def _(
    rig: LaneRig, left: LaneSide, right: LaneSide, change: Callable[[bytes], bytes]
) -> None:
    left.queue(_NBYTES, CUTS["pages"])
    left.flush()
    parcel = right.inbox.popleft()
    wrong = change(parcel.descriptor)
    try:
        right.receive(dataclasses.replace(parcel, descriptor=wrong))
    except ProtocolError as exc:
        require(str(exc) != "", "the error gives no reason")
    else:
        raise CheckFailed(f"receive accepted a descriptor of {len(wrong)} bytes")
    await rig.settle()
    require(not right.arrived, "a payload arrived whose descriptor was refused")


@descriptor.lanes("truncated", "Truncated descriptors of {} do no harm", _KINDS)
async def _(rig: LaneRig, left: LaneSide, right: LaneSide, cut: Cut | None) -> None:
    length = await _harmless(rig, cut, lambda descriptor: descriptor)
    for end in sorted({*range(min(length, 40)), max(length - 1, 0)}):
        await _harmless(rig, cut, operator.itemgetter(slice(end)))


@descriptor.lanes("flipped", "Descriptors of {} with flipped bits do no harm", _KINDS)
async def _(rig: LaneRig, left: LaneSide, right: LaneSide, cut: Cut | None) -> None:
    length = await _harmless(rig, cut, lambda descriptor: descriptor)
    chance = random.Random(0)  # noqa: S311 - the same bits in every run
    places = {*range(min(length, 16))}
    places |= {chance.randrange(length) for _ in range(16) if length}
    for place in sorted(places):
        bit = 1 << chance.randrange(8)
        await _harmless(rig, cut, functools.partial(_flip, place, bit))


def _flip(place: int, bit: int, descriptor: bytes) -> bytes:
    if place >= len(descriptor):
        return descriptor
    changed = bytes([descriptor[place] ^ bit])
    return descriptor[:place] + changed + descriptor[place + 1 :]


async def _harmless(
    rig: LaneRig, cut: Cut | None, change: Callable[[bytes], bytes]
) -> int:
    """Give a new lane one changed descriptor; return the length of the right one."""
    left, right = await rig.pair()
    left.queue(_NBYTES, cut)
    left.flush()
    parcel = right.inbox.popleft()
    # The side's own check would compare with the payload of the correct descriptor.
    memory = Memory(_NBYTES, CUTS["odd-pages"])
    right.land = lambda _: memory
    right.trusting = False
    try:
        right.receive(dataclasses.replace(parcel, descriptor=change(parcel.descriptor)))
        right.flush()
    except ProtocolError:
        right.abort()
    await rig.settle()
    left.abort()
    right.abort()
    await rig.closes(left, right)
    rig.forget(left, right)
    require(memory.gaps_are_whole(), "memory beside the landing was written")
    return len(parcel.descriptor)
