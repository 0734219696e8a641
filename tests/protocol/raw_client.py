"""Pulls and pushes KV, from the pages alone: both sides of a transfer, asked or asking.

Written from docs/topics/protocol.md and protocol-kv-transfers.md, with nothing of
kvwire. One transfer at a time goes over a connection.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.protocol.raw_link import (
    AGREE,
    COMMIT,
    COMMIT_ACK,
    DATA,
    FAIL,
    FIN,
    OPEN,
    PROFILE,
    SEGMENT,
    SEGMENT_ACK,
    Frame,
    RawLink,
    Refused,
)
from tests.protocol.raw_plan import (
    AXES,
    Box,
    Carried,
    Element,
    Misfit,
    Share,
    bitmap,
    carried,
    hashes_digest,
    plan_digest,
)


class RawCache:
    """A cache of one group in one piece of memory, nested as its share says."""

    def __init__(self, share: Share, ids: Sequence[int], pool: int) -> None:
        self.share, self._ids = share, ids
        steps, step = {}, share.item_bytes
        for axis in reversed(share.order):
            steps[axis] = step
            step *= pool if axis == "block" else share.extents[axis]
        self._steps = [steps[axis] for axis in AXES]
        self.memory = bytearray(step)

    def place(self, element: Element) -> slice:
        """Finds an element in the memory."""
        share = self.share
        layer, head = element.layer - share.layers[0], element.head - share.heads[0]
        position, token = divmod(element.token, share.n["block_tokens"])
        at = (layer, self._ids[position], element.kv, token, head, element.dim)
        begin = sum(map(operator.mul, at, self._steps))
        return slice(begin, begin + share.item_bytes)


@dataclass(kw_only=True)
class Side:
    """This side's part in a transfer, over all connections that it goes on with.

    Attributes:
        hashes: By group, one for each block of its list.
        have: By group, whether it has each block of its list: a consumer's.
        met: The other side's ``end``, once it was met.
        landed: Boxes that are whole, here or at the consumer.
        complete: Whether COMMIT has said that everything was marked.
    """

    id: bytes
    cache: RawCache
    producer: bool
    hashes: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    have: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    end: bytes = field(default_factory=lambda: os.urandom(8))
    met: bytes = b""
    landed: list[Box] = field(default_factory=list)
    damaged: list[Box] = field(default_factory=list)
    settled: bool = False
    complete: bool = False
    groups: list[Carried] = field(default_factory=list)

    @property
    def packed_have(self) -> list[tuple[str, bytes]]:
        """``have`` as it travels."""
        return [(name, bitmap(bits)) for name, bits in self.have.items()]

    def description(self) -> bytes:
        """Writes what OPEN or AGREE carry; with the plan, once there is one."""
        plan = plan_digest(self.groups) if self.groups else b""
        landed = self.landed if self.met and not self.producer else []
        fields = (
            *([self.cache.share.encoded], self.end, self.met),
            *(hashes_digest(self.hashes), self.packed_have, landed),
            *(plan, self.settled),
        )
        return msgspec.msgpack.encode(fields)

    def meet(self, description: bytes) -> bytes:
        """Reads the other side's description, and plans; returns its plan."""
        given = msgspec.msgpack.decode(description)
        fields = [*given, *(b"", b"", b"", [], [], b"", False)[len(given) - 1 :]]
        geometry, end, _, hashes, have, landed, plan, _ = fields[:8]
        mine = hashes_digest(self.hashes)
        if (mine and hashes and mine != hashes) or self.met not in (b"", end):
            raise Misfit("other hashes, or another transfer")
        here, there = [self.cache.share], [Share(*group) for group in geometry]
        if self.producer:
            self.landed = [tuple(box) for box in landed]
        else:
            here, there, have = there, here, self.packed_have
        self.groups = carried(here, there, dict(have) if mine and hashes else {})
        self.met = end
        return bytes(plan)


async def ask(link: RawLink, side: Side, request: int) -> None:
    """Opens a transfer and waits for the answer: pull or push."""
    side.groups = []
    link.send(
        *(OPEN, side.id, not side.producer, 0, side.description()), request=request
    )
    frame = await _next(link, request)
    assert frame.type == AGREE
    _meet(link, side, request, frame.fields[0], compare=True)


async def answer(link: RawLink, side: Side) -> int:
    """Waits until the other side opens a transfer, and agrees: publish or expect."""
    frame = await link.receive()
    assert frame.type == OPEN
    assert frame.fields[:2] == [side.id, side.producer]
    _meet(link, side, frame.request, frame.fields[3], compare=False)
    link.send(AGREE, side.description(), request=frame.request)
    return frame.request


async def produce(
    link: RawLink,
    side: Side,
    request: int,
    boxes: Sequence[Box],
    *,
    complete: bool = True,
    spoiled: Collection[int] = (),
) -> None:
    """Sends boxes, and waits until the consumer has settled."""
    memory = side.cache.memory
    for number, box in enumerate(boxes, 1):
        elements = side.groups[box[0]].elements(box)
        data = b"".join(memory[side.cache.place(element)] for element in elements)
        link.send(SEGMENT, number, box, len(data), request=request)
        for at in range(0, len(data), link.chunk_bytes):
            chunk = data[at : at + link.chunk_bytes]
            wrong = number in spoiled and at + len(chunk) == len(data)
            link.send_data(request, number, at, chunk, intact=not wrong)
    link.send(COMMIT, len(boxes), complete, request=request)
    while (frame := await _next(link, request)).type != COMMIT_ACK:
        assert frame.type == SEGMENT_ACK
        side.landed += [boxes[number - 1] for number in frame.fields[0]]
    side.damaged += [boxes[number - 1] for number in frame.fields[0]]
    link.send(FIN, 0, request=request)


async def consume(link: RawLink, side: Side, request: int) -> None:
    """Receives until the producer knows that all it has marked is here."""
    segments: list[_Segment] = []
    committed = False
    while (frame := await _next(link, request)).type != FIN:
        if frame.type == SEGMENT:
            number, box, nbytes = frame.fields[:3]
            segments.append(_Segment(tuple(box), bytearray(nbytes)))
            assert number == len(segments)
            assert nbytes == side.groups[box[0]].nbytes(tuple(box))
        elif frame.type == COMMIT:
            count, side.complete = frame.fields
            assert count == len(segments)
            committed = True
        else:
            _take(link, side, segments[frame.segment - 1], frame)
        if committed and all(segment.left == 0 for segment in segments):
            numbered = enumerate(segments, 1)
            damaged = [number for number, segment in numbered if segment.damaged]
            side.damaged += [segments[number - 1].box for number in damaged]
            side.settled = True
            link.send(COMMIT_ACK, damaged, request=request)


class _Segment:
    """A segment on its way in."""

    def __init__(self, box: Box, memory: bytearray) -> None:
        self.box, self.memory, self.left = box, memory, len(memory)
        self.damaged = False


def _take(link: RawLink, side: Side, segment: _Segment, frame: Frame) -> None:
    assert frame.type == DATA
    at, data = frame.offset, frame.payload
    segment.memory[at : at + len(data)] = data
    segment.left -= len(data)
    segment.damaged |= not frame.intact
    if segment.left or segment.damaged:
        return
    cache, size = side.cache, side.cache.share.item_bytes
    elements = side.groups[segment.box[0]].elements(segment.box)
    for number, element in enumerate(elements):
        item = segment.memory[number * size : (number + 1) * size]
        cache.memory[cache.place(element)] = item
    side.landed.append(segment.box)
    link.send(SEGMENT_ACK, [frame.segment], request=frame.request)


def _meet(link: RawLink, side: Side, request: int, said: Any, *, compare: bool) -> None:
    """Plans, or refuses the transfer."""
    try:
        plan = side.meet(said)
        if compare and plan != plan_digest(side.groups):
            raise Misfit("the plans differ")
    except Misfit as exc:
        link.send(FAIL, PROFILE, str(exc), request=request)
        raise


async def _next(link: RawLink, request: int) -> Frame:
    frame = await link.receive()
    assert frame.request == request, frame
    if frame.type == FAIL:
        raise Refused(*frame.fields)
    return frame
