"""A peer that keeps the protocol until AGREE, and then does whatever it likes.

It is the client that was written from the protocol pages, over a real socket. Whatever
it says inside a transfer that kvwire has agreed to: the connection ends with the number
of the rule, no byte outside the blocks of the transfer is written, what kvwire reports
as landed is right, memory drains, and another connection goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.fault.stranger import expect_ended_by
from tests.protocol import raw_client as raw
from tests.protocol.raw_plan import Box
from tests.protocol.world import (
    FREE,
    TOKENS,
    Ours,
    Theirs,
    World,
    expected,
    layers_of,
    stamps,
    world,
)
from tests.support import inside
from tests.support.cases import each

REQUEST = 1
BEYOND = 2**31 - 1


@dataclass
class Liar:
    """The client inside a transfer that was agreed on."""

    link: raw.RawLink
    side: raw.Side

    @property
    def box(self) -> Box:
        return layers_of(self.side)[0]

    @property
    def nbytes(self) -> int:
        return self.side.groups[0].nbytes(self.box)


Lie = Callable[[Liar], None]


def say(kind: int, *fields: Any, request: int = REQUEST) -> Lie:
    return lambda p: p.link.send(kind, *fields, request=request)


def describe(kind: int, *fields: Any) -> Lie:
    """The same with a description of its side behind the fields."""
    return lambda p: say(kind, *fields, p.side.description())(p)


def mark(
    number: int = 1, box: Box | None = None, *, more: int = 0, nbytes: int | None = None
) -> Lie:
    """A mark of a layer, or of a box; it names more bytes than that has, or others."""

    def lie(p: Liar) -> None:
        said = p.nbytes + more if nbytes is None else nbytes
        say(raw.SEGMENT, number, box or p.box, said)(p)

    return lie


def data(
    nbytes: int | None = None, *, more: int = 0, segment: int = 1, offset: int = 0
) -> Lie:
    """Payload of a layer's length and more, or of any."""

    def lie(p: Liar) -> None:
        length = p.nbytes + more if nbytes is None else nbytes
        p.link.send_data(REQUEST, segment, offset, bytes(length), intact=True)

    return lie


def layer(p: Liar) -> None:
    """A layer as it should be."""
    mark()(p)
    p.link.send_data(REQUEST, 1, 0, bytes_of(p), intact=True)


def bytes_of(p: Liar) -> bytes:
    place, memory = p.side.cache.place, p.side.cache.memory
    elements = p.side.groups[0].elements(p.box)
    return b"".join(memory[place(element)] for element in elements)


def whole(
    number: int = 1, box: Box | None = None, *, more: int = 0, commit: int = 0
) -> Lie:
    """A layer in one frame with its mark; or with that of a box, or of other bytes."""

    def lie(p: Liar) -> None:
        group, layer, layers, granule, granules = box or p.box
        mark = group << 56 | layer << 44 | layers << 32 | granule << 16 | granules
        data = (bytes_of(p) + bytes(1))[: p.nbytes + more]
        place = REQUEST, number, commit << 62 | mark
        p.link.send_data(*place, data, intact=True, frame_type=raw.MARKED_DATA)

    return lie


async def expect_rule(w: World, rule: str) -> None:
    """The connection has ended by a rule, and nothing of it is left."""
    await expect_ended_by(rule, w.connection)
    assert not len(inside.buffers(w.ours))


async def expect_fine(w: World) -> None:
    """A whole transfer with another peer."""
    w.link = await raw.RawLink.connect(w.address.host, w.address.port)
    ours = Ours()
    inc, side = await expected(w, ours, Theirs())
    await raw.produce(w.link, side, REQUEST, layers_of(side))
    assert (await inc).complete
    assert ours.values() == stamps()


# --- a producer that lies -------------------------------------------------------------

COMMITTED = say(raw.COMMIT, 1, True)
WHOLE, LAST = whole(), whole(commit=1)
LANDS = {layer, WHOLE, LAST}


@pytest.mark.rule("KVW-TR-09", "breaks")
@each(
    "told",
    {
        "a group that there is not": ("KVW-TR-09", mark(box=(1, 0, 1, 0, 1))),
        "a layer beyond": ("KVW-TR-09", mark(box=(0, 2, 1, 0, 1))),
        "layers beyond": ("KVW-TR-09", mark(box=(0, 1, BEYOND, 0, 1))),
        "a granule beyond": ("KVW-TR-09", mark(box=(0, 0, 1, BEYOND, 1))),
        "granules beyond": ("KVW-TR-09", mark(box=(0, 0, 1, 1, BEYOND))),
        "no layers": ("KVW-CT-01", mark(box=(0, 0, 0, 0, 1), nbytes=0)),
        "no granules": ("KVW-CT-01", mark(box=(0, 0, 1, 0, 0), nbytes=0)),
        "a byte more": ("KVW-TR-09", mark(more=1)),
        "a byte less": ("KVW-TR-09", mark(more=-1)),
        "no bytes": ("KVW-CT-01", mark(nbytes=0)),
        "64 GiB": ("KVW-TR-09", mark(nbytes=2**36)),
        "whole, of another group": ("KVW-TR-09", whole(box=(1, 0, 1, 0, 1))),
        "whole, of a layer beyond": ("KVW-TR-09", whole(box=(0, 2, 1, 0, 1))),
        "whole, of granules beyond": ("KVW-TR-09", whole(box=(0, 0, 1, 1, 2**16 - 1))),
        "whole, of no layers": ("KVW-TR-09", whole(box=(0, 0, 0, 0, 1))),
        "whole, of no granules": ("KVW-TR-09", whole(box=(0, 0, 1, 0, 0))),
        "whole, and a byte more": ("KVW-TR-09", whole(more=1)),
        "whole, and a byte less": ("KVW-TR-09", whole(more=-1)),
        "whole, out of turn": ("KVW-TR-03", whole(2)),
        "whole, twice": ("KVW-TR-03", WHOLE, WHOLE),
        "whole, a box twice": ("KVW-TR-11", WHOLE, whole(2)),
        "whole, behind the commit": ("KVW-TR-03", mark(), COMMITTED, whole(2)),
        "whole, behind the last": ("KVW-TR-03", LAST, whole(2)),
        "whole, and payload of it": ("KVW-TR-07", WHOLE, data()),
        "a mark out of turn": ("KVW-TR-03", mark(2)),
        "a mark of number 0": ("KVW-CT-01", mark(0)),
        "a mark twice": ("KVW-TR-03", mark(), mark()),
        "a box twice": ("KVW-TR-11", mark(), mark(2)),
        "payload unmarked": ("KVW-TR-07", data(8)),
        "payload of another segment": ("KVW-TR-07", mark(), data(8, segment=2)),
        "payload too long": ("KVW-DT-02", mark(), data(more=1)),
        "payload too short": ("KVW-DT-02", mark(), data(more=-1)),
        "payload beside its place": ("KVW-DT-02", mark(), data(8, offset=8)),
        "payload behind the end": (
            "KVW-DT-02",
            mark(),
            data(8, offset=raw.CHUNK_BYTES),
        ),
        "a chunk twice": ("KVW-DT-03", layer, data()),
        "a commit of what was not marked": ("KVW-TR-04", say(raw.COMMIT, 5, True)),
        "a commit of less": ("KVW-TR-04", mark(), say(raw.COMMIT, 0, True)),
        "a commit twice": ("KVW-TR-04", mark(), COMMITTED, COMMITTED),
        "a mark behind the commit": ("KVW-TR-03", mark(), COMMITTED, mark(2)),
        "done before it is settled": ("KVW-RQ-01", say(raw.FIN, 0)),
        "done behind the commit": ("KVW-RQ-01", mark(), COMMITTED, say(raw.FIN, 0)),
        "landed, said by the producer": ("KVW-TR-08", say(raw.SEGMENT_ACK, [1])),
        "settled, said by the producer": ("KVW-TR-08", say(raw.COMMIT_ACK, [])),
        "an answer to its own question": ("KVW-RQ-01", describe(raw.AGREE)),
        "its question again": ("KVW-RQ-02", describe(raw.OPEN, b"sx", False, 0)),
        "a transfer that never was": ("KVW-RQ-04", say(raw.COMMIT, 0, True, request=3)),
    },
)
async def test_a_producer_that_lies(told: tuple[str, *tuple[Lie, ...]]) -> None:
    rule, *lies = told
    async with world(hostile=True, resume=False) as w:
        ours = Ours()
        inc, side = await expected(w, ours, Theirs())
        peer = Liar(w.link, side)
        for tell in lies:
            tell(peer)
        await expect_rule(w, rule)
        outcome = await inc
        assert not outcome.complete
        assert not outcome.landed
        await inc.drained()
        expect_only(ours, layers=len(LANDS.intersection(lies)))
        await expect_fine(w)


def expect_only(ours: Ours, layers: int) -> None:
    """So many layers may have landed; nobody has written to anything else."""
    values = ours.values()
    whole = stamps(lambda element: element.layer < layers)
    nothing = stamps(lambda element: False)
    assert values in (whole, nothing)
    rest = [block for block in range(12) if block not in ours.ids]
    assert (ours._bytes[:, rest] == FREE).all()


# --- a consumer that lies -------------------------------------------------------------


@each(
    "told",
    {
        "landed, and nothing was marked": ("KVW-TR-05", say(raw.SEGMENT_ACK, [1])),
        "landed, of number 0": ("KVW-CT-01", say(raw.SEGMENT_ACK, [0])),
        "landed far beyond": ("KVW-CT-01", say(raw.SEGMENT_ACK, [BEYOND])),
        "settled before the commit": ("KVW-TR-06", say(raw.COMMIT_ACK, [])),
        "damage that cannot be": ("KVW-TR-06", say(raw.COMMIT_ACK, [1, 2])),
        "a mark, said by the consumer": ("KVW-TR-08", mark()),
        "a commit, said by the consumer": ("KVW-TR-08", say(raw.COMMIT, 0, True)),
        "payload for the producer": ("KVW-TR-07", data(8)),
        "done, said by the consumer": ("KVW-OS-02", say(raw.FIN, 0)),
        "an answer to its own question": ("KVW-RQ-01", describe(raw.AGREE)),
    },
)
async def test_a_consumer_that_lies(told: tuple[str, Lie]) -> None:
    rule, tell = told
    async with world(hostile=True, resume=False) as w:
        ours, theirs = Ours(), Theirs()
        ours.fill()
        out = w.ours.publish("x", ours.cache, ours.ids, tokens=TOKENS)
        peer = Liar(w.link, theirs.side(producer=False))
        await raw.ask(w.link, peer.side, REQUEST)
        tell(peer)
        await expect_rule(w, rule)
        outcome = await out
        assert not outcome.landed
        await out.drained()
        assert ours.values() == stamps()
        await expect_fine(w)


@pytest.mark.parametrize("segments", [[1, 1], [2, 1, 2]])
async def test_a_consumer_that_acknowledges_twice(segments: list[int]) -> None:
    """What it has said once, of what was sent, may count; the rest does not."""
    async with world(hostile=True, resume=False) as w:
        ours, theirs = Ours(), Theirs()
        ours.fill()
        out = w.ours.publish("x", ours.cache, ours.ids, tokens=TOKENS, group_bytes=1)
        peer = Liar(w.link, theirs.side(producer=False))
        await raw.ask(w.link, peer.side, REQUEST)
        out.ready()
        marks = {raw.SEGMENT, raw.MARKED_DATA}
        while (await w.link.receive()).type not in marks:
            pass
        say(raw.SEGMENT_ACK, segments)(peer)
        await expect_rule(w, "KVW-TR-05")
        assert not (await out).complete
        await out.drained()


async def test_a_consumer_that_settles_and_goes_on() -> None:
    """The transfer is over with its last word; what comes behind it is dropped."""
    async with world() as w:
        ours, theirs = Ours(), Theirs()
        ours.fill()
        out = w.ours.publish("x", ours.cache, ours.ids, tokens=TOKENS)
        side = theirs.side(producer=False)
        await raw.ask(w.link, side, REQUEST)
        out.ready()
        out.finish()
        await raw.consume(w.link, side, REQUEST)
        w.link.send(raw.SEGMENT_ACK, [1], request=REQUEST)
        w.link.send(raw.FAIL, 36, "too late", request=REQUEST)
        assert (await out).complete
        assert theirs.values() == stamps()
        await asyncio.gather(w.connection.send(5, b""), out.drained())


@pytest.mark.parametrize("produces", [False, True])
async def test_an_answer_with_another_plan(produces: bool) -> None:
    """Of the same bytes in another order: it fails before one of them moves."""
    async with world() as w:
        ours = Ours()
        ours.fill()
        verb = w.connection.pull if produces else w.connection.push
        end = verb("x", ours.cache, ours.ids, tokens=TOKENS)
        side = Theirs().side(producer=produces)
        asked = await w.link.receive()
        assert asked.type == raw.OPEN
        side.meet(asked.fields[3])
        side.groups[0].order = side.groups[0].order[::-1]
        w.link.send(raw.AGREE, side.description(), request=asked.request)
        told = await w.link.receive()
        assert (told.type, told.fields[0]) == (raw.FAIL, raw.PROFILE)
        outcome = await end
        assert not outcome.landed
        (reason,) = outcome.missing.reasons
        assert "order the bytes differently" in reason
        await end.drained()
