"""Descriptors from a peer that lies: refused, or harmless, and never written beyond.

A descriptor that names other memory of the peer than it should cannot be told from a
right one: the peer chooses what it sends. What counts is that this side raises nothing
but ProtocolError and writes nowhere but to the landing.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import random
from collections.abc import Callable

from kvwire.errors import ProtocolError
from kvwire.limits import DESCRIPTOR_BYTES_MAX
from kvwire.testing.conformance.check import CheckFailed, require
from kvwire.testing.conformance.content import CUTS, Cut, Memory
from kvwire.testing.conformance.lane_side import LaneSide, Parcel
from kvwire.testing.conformance.rig import LaneGroup, LaneRig

lanes: LaneGroup = LaneGroup("descriptor")

_NBYTES = 100_000
_WRONG: dict[str, Callable[[bytes], bytes]] = {
    "one-byte-more": lambda descriptor: descriptor + b"\x00",
    "too-long": lambda descriptor: descriptor + bytes(DESCRIPTOR_BYTES_MAX),
    "doubled": lambda descriptor: descriptor * 2 or b"\x01",
    "of-ones": lambda descriptor: b"\xff" * (len(descriptor) + 1),
}
_KINDS: dict[str, Cut | None] = {
    name: CUTS[name] for name in ("view", "pages", "uneven")
}


@lanes.each("refused", "A descriptor that no lane would make is refused: {}", _WRONG)
async def _refused(rig: LaneRig, change: Callable[[bytes], bytes]) -> None:
    left, right = await rig.pair()
    left.queue(_NBYTES, CUTS["pages"])
    left.flush()
    parcel = right.inbox.popleft()
    wrong = change(parcel.descriptor)
    try:
        right.receive(dataclasses.replace(parcel, descriptor=wrong))
    except ProtocolError as exc:
        require(str(exc) != "", "it does not say why")
    else:
        raise CheckFailed(f"receive took a descriptor of {len(wrong)} bytes")
    await rig.settle()
    require(not right.arrived, "a payload arrived that was refused")


@lanes.each("truncated", "Truncated descriptors of {} do no harm", _KINDS)
async def _truncated(rig: LaneRig, cut: Cut | None) -> None:
    left, right = await rig.pair()
    descriptor = _one(left, right, cut).descriptor
    for length in sorted({*range(min(len(descriptor), 40)), len(descriptor) - 1}):
        if 0 <= length < len(descriptor):
            await _harmless(rig, cut, operator.itemgetter(slice(length)))


@lanes.each("flipped", "Descriptors of {} with wrong bits do no harm", _KINDS)
async def _flipped(rig: LaneRig, cut: Cut | None) -> None:
    left, right = await rig.pair()
    descriptor = _one(left, right, cut).descriptor
    chance = random.Random(0)  # noqa: S311 - the same bits in every run
    places = {*range(min(len(descriptor), 16))}
    places |= {chance.randrange(len(descriptor)) for _ in range(16) if descriptor}
    for place in sorted(places):
        bit = 1 << chance.randrange(8)
        await _harmless(rig, cut, functools.partial(_flip, place, bit))


def _one(left: LaneSide, right: LaneSide, cut: Cut | None) -> Parcel:
    left.queue(_NBYTES, cut)
    left.flush()
    return right.inbox.popleft()


def _flip(place: int, bit: int, descriptor: bytes) -> bytes:
    if place >= len(descriptor):
        return descriptor
    return (
        descriptor[:place] + bytes([descriptor[place] ^ bit]) + descriptor[place + 1 :]
    )


async def _harmless(
    rig: LaneRig, cut: Cut | None, change: Callable[[bytes], bytes]
) -> None:
    """Give a lane of its own one wrong descriptor."""
    left, right = await rig.pair()
    parcel = _one(left, right, cut)
    # Its own check of what arrived would compare with what an honest descriptor brings.
    memory = Memory(_NBYTES, CUTS["odd-pages"])
    landed = dataclasses.replace(parcel, descriptor=change(parcel.descriptor))
    right.land = lambda _: memory
    right.trusting = False
    try:
        right.receive(landed)
        right.flush()
    except ProtocolError:
        right.abort()
    await rig.settle()
    left.abort()
    right.abort()
    await rig.closes(left, right)
    rig.forget(left, right)
    require(memory.gaps_are_whole(), "memory beside the landing was written")
