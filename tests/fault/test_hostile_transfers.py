"""A peer that keeps the protocol until AGREE, and then does whatever it likes.

It is the client that was written from the protocol pages, over a real socket. Whatever
it says inside a transfer that kvwire has agreed to: the connection ends with the number
of the rule, no byte outside the blocks of the transfer is written, what kvwire reports
as landed is right, memory drains, and another connection goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import kvwire
from tests.fault.stranger import expect_ended_by
from tests.protocol.raw_client import (
    AGREE,
    COMMIT,
    COMMIT_ACK,
    FAIL,
    FIN,
    OPEN,
    SEGMENT,
    SEGMENT_ACK,
    RawLink,
    Side,
    ask,
    consume,
    produce,
)
from tests.protocol.raw_plan import Box
from tests.protocol.world import (
    FREE,
    TOKENS,
    Ours,
    Theirs,
    World,
    layers_of,
    stamps,
    world,
)

REQUEST = 1
BEYOND = 2**31 - 1


@dataclass
class Liar:
    """The client inside a transfer that was agreed on."""

    link: RawLink
    side: Side

    @property
    def box(self) -> Box:
        return layers_of(self.side)[0]

    @property
    def nbytes(self) -> int:
        return self.side.groups[0].nbytes(self.box)

    def say(self, kind: int, *fields: Any, request: int = REQUEST) -> None:
        self.link.send(kind, *fields, request=request)

    def mark(self, number: int = 1, box: Any = None, nbytes: int | None = None) -> None:
        box = self.box if box is None else box
        self.say(SEGMENT, number, box, self.nbytes if nbytes is None else nbytes)

    def data(self, length: int, segment: int = 1, offset: int = 0) -> None:
        self.link.send_data(REQUEST, segment, offset, bytes(length), intact=True)

    def segment(self) -> None:
        """A layer as it should be."""
        self.mark()
        place, memory = self.side.cache.place, self.side.cache.memory
        elements = self.side.groups[0].elements(self.box)
        data = b"".join(memory[place(element)] for element in elements)
        self.link.send_data(REQUEST, 1, 0, data, intact=True)


async def expect_rule(w: World, rule: str) -> None:
    """The connection has ended by a rule, and nothing of it is left."""
    await expect_ended_by(rule, w.connection)
    assert not len(w.ours._state.buffers)


async def expect_fine(w: World) -> None:
    """A whole transfer with another peer."""
    link = await RawLink.connect(w.address.host, w.address.port, incarnation=bytes(16))
    ours, theirs = Ours(), Theirs()
    theirs.fill()
    inc = w.ours.expect("x", ours.cache, ours.ids, tokens=TOKENS)
    side = theirs.side(producer=True)
    await ask(link, side, REQUEST)
    await produce(link, side, REQUEST, layers_of(side))
    assert (await inc).complete
    assert ours.values() == stamps()
    link.abort()


@asynccontextmanager
async def hostile_world() -> AsyncIterator[World]:
    """A world whose connection ends as the hostile peer has it."""
    async with kvwire.open(name="ours", resume=False) as ours:
        address = await ours.listen("tcp://127.0.0.1:0")
        link = await RawLink.connect(address.host, address.port)
        w = World(ours, address, await anext(ours.connections()), link)
        try:
            yield w
        finally:
            w.link.abort()


Lie = Callable[[Liar], None]


def twice(lie: Lie) -> Lie:
    def again(peer: Liar) -> None:
        lie(peer)
        lie(peer)

    return again


def both(*lies: Lie) -> Lie:
    def in_turn(peer: Liar) -> None:
        for lie in lies:
            lie(peer)

    return in_turn


# --- a producer that lies -------------------------------------------------------------

PRODUCERS: dict[str, tuple[Lie, str]] = {
    "a group that there is not": (lambda p: p.mark(box=(1, 0, 1, 0, 1)), "KVW-TR-09"),
    "a layer beyond": (lambda p: p.mark(box=(0, 2, 1, 0, 1)), "KVW-TR-09"),
    "layers beyond": (lambda p: p.mark(box=(0, 1, BEYOND, 0, 1)), "KVW-TR-09"),
    "a granule beyond": (lambda p: p.mark(box=(0, 0, 1, BEYOND, 1)), "KVW-TR-09"),
    "granules beyond": (lambda p: p.mark(box=(0, 0, 1, 1, BEYOND)), "KVW-TR-09"),
    "no layers": (lambda p: p.mark(box=(0, 0, 0, 0, 1), nbytes=0), "KVW-CT-01"),
    "no granules": (lambda p: p.mark(box=(0, 0, 1, 0, 0), nbytes=0), "KVW-CT-01"),
    "a byte more": (lambda p: p.mark(nbytes=p.nbytes + 1), "KVW-TR-09"),
    "a byte less": (lambda p: p.mark(nbytes=p.nbytes - 1), "KVW-TR-09"),
    "no bytes": (lambda p: p.mark(nbytes=0), "KVW-CT-01"),
    "64 GiB": (lambda p: p.mark(nbytes=2**36), "KVW-TR-09"),
    "a mark out of turn": (lambda p: p.mark(number=2), "KVW-TR-03"),
    "a mark of number 0": (lambda p: p.mark(number=0), "KVW-CT-01"),
    "a mark twice": (twice(lambda p: p.mark()), "KVW-TR-03"),
    "a box twice": (both(lambda p: p.mark(), lambda p: p.mark(2)), "KVW-TR-11"),
    "payload unmarked": (lambda p: p.data(8), "KVW-TR-07"),
    "payload of another segment": (
        both(lambda p: p.mark(), lambda p: p.data(8, segment=2)),
        "KVW-TR-07",
    ),
    "payload too long": (
        both(lambda p: p.mark(), lambda p: p.data(p.nbytes + 1)),
        "KVW-DT-02",
    ),
    "payload too short": (
        both(lambda p: p.mark(), lambda p: p.data(p.nbytes - 1)),
        "KVW-DT-02",
    ),
    "payload beside its place": (
        both(lambda p: p.mark(), lambda p: p.data(8, offset=8)),
        "KVW-DT-02",
    ),
    "payload behind the end": (
        both(lambda p: p.mark(), lambda p: p.data(8, offset=p.link.chunk_bytes)),
        "KVW-DT-02",
    ),
    "a chunk twice": (
        both(Liar.segment, lambda p: p.data(p.nbytes)),
        "KVW-DT-03",
    ),
    "a commit of what was not marked": (lambda p: p.say(COMMIT, 5, True), "KVW-TR-04"),
    "a commit of less": (
        both(lambda p: p.mark(), lambda p: p.say(COMMIT, 0, True)),
        "KVW-TR-04",
    ),
    "a commit twice": (
        both(lambda p: p.mark(), twice(lambda p: p.say(COMMIT, 1, True))),
        "KVW-TR-04",
    ),
    "a mark behind the commit": (
        both(
            lambda p: p.mark(),
            lambda p: p.say(COMMIT, 1, True),
            lambda p: p.mark(2),
        ),
        "KVW-TR-03",
    ),
    "done before it is settled": (lambda p: p.say(FIN, 0), "KVW-RQ-01"),
    "done behind the commit": (
        both(
            lambda p: p.mark(),
            lambda p: p.say(COMMIT, 1, True),
            lambda p: p.say(FIN, 0),
        ),
        "KVW-RQ-01",
    ),
    "landed, said by the producer": (lambda p: p.say(SEGMENT_ACK, [1]), "KVW-TR-08"),
    "settled, said by the producer": (lambda p: p.say(COMMIT_ACK, []), "KVW-TR-08"),
    "an answer to its own question": (
        lambda p: p.say(AGREE, p.side.description()),
        "KVW-RQ-01",
    ),
    "its question again": (
        lambda p: p.say(OPEN, b"sx", False, 0, p.side.description()),
        "KVW-RQ-02",
    ),
    "a transfer that never was": (
        lambda p: p.say(COMMIT, 0, True, request=3),
        "KVW-RQ-04",
    ),
}


@pytest.mark.parametrize("lie", PRODUCERS)
async def test_a_producer_that_lies(lie: str) -> None:
    told, rule = PRODUCERS[lie]
    async with hostile_world() as w:
        ours, theirs = Ours(), Theirs()
        theirs.fill()
        inc = w.ours.expect("x", ours.cache, ours.ids, tokens=TOKENS)
        peer = Liar(w.link, theirs.side(producer=True))
        await ask(w.link, peer.side, REQUEST)
        told(peer)
        await expect_rule(w, rule)
        outcome = await inc
        assert not outcome.complete
        assert not outcome.landed
        await inc.drained()
        expect_only(ours, layers=1 if "chunk twice" in lie else 0)
        await expect_fine(w)


def expect_only(ours: Ours, layers: int) -> None:
    """So many layers may have landed; nobody has written to anything else."""
    values = ours.values()
    whole = stamps(lambda element: element.layer < layers)
    nothing = stamps(lambda element: False)
    assert values in (whole, nothing)
    rest = [block for block in range(12) if block not in ours.ids]
    assert (ours._bytes[:, rest] == FREE).all()


async def test_a_commit_that_claims_more_than_was_marked() -> None:
    """Complete is what has landed, and not what the producer calls it."""
    async with world() as w:
        ours, theirs = Ours(), Theirs()
        theirs.fill()
        inc = w.ours.expect("x", ours.cache, ours.ids, tokens=TOKENS)
        side = theirs.side(producer=True)
        await ask(w.link, side, REQUEST)
        await produce(w.link, side, REQUEST, layers_of(side)[:1], complete=True)
        outcome = await inc
        assert not outcome.complete
        assert not outcome.landed
        assert ours.values() == stamps(lambda element: element.layer == 0)


# --- a consumer that lies -------------------------------------------------------------

CONSUMERS: dict[str, tuple[Lie, str]] = {
    "landed, and nothing was marked": (lambda p: p.say(SEGMENT_ACK, [1]), "KVW-TR-05"),
    "landed, of number 0": (lambda p: p.say(SEGMENT_ACK, [0]), "KVW-CT-01"),
    "landed far beyond": (lambda p: p.say(SEGMENT_ACK, [BEYOND]), "KVW-CT-01"),
    "settled before the commit": (lambda p: p.say(COMMIT_ACK, []), "KVW-TR-06"),
    "damage that cannot be": (lambda p: p.say(COMMIT_ACK, [1, 2]), "KVW-TR-06"),
    "a mark, said by the consumer": (lambda p: p.mark(), "KVW-TR-08"),
    "a commit, said by the consumer": (
        lambda p: p.say(COMMIT, 0, True),
        "KVW-TR-08",
    ),
    "payload for the producer": (lambda p: p.data(8), "KVW-TR-07"),
    "done, said by the consumer": (lambda p: p.say(FIN, 0), "KVW-OS-02"),
    "an answer to its own question": (
        lambda p: p.say(AGREE, p.side.description()),
        "KVW-RQ-01",
    ),
}


@pytest.mark.parametrize("lie", CONSUMERS)
async def test_a_consumer_that_lies(lie: str) -> None:
    told, rule = CONSUMERS[lie]
    async with hostile_world() as w:
        ours, theirs = Ours(), Theirs()
        ours.fill()
        out = w.ours.publish("x", ours.cache, ours.ids, tokens=TOKENS)
        peer = Liar(w.link, theirs.side(producer=False))
        await ask(w.link, peer.side, REQUEST)
        told(peer)
        await expect_rule(w, rule)
        outcome = await out
        assert not outcome.landed
        await out.drained()
        assert ours.values() == stamps()
        await expect_fine(w)


@pytest.mark.parametrize("segments", [[1, 1], [2, 1, 2]])
async def test_a_consumer_that_acknowledges_twice(segments: list[int]) -> None:
    """What it has said once, of what was sent, may count; the rest does not."""
    async with hostile_world() as w:
        ours, theirs = Ours(), Theirs()
        ours.fill()
        out = w.ours.publish("x", ours.cache, ours.ids, tokens=TOKENS, group_bytes=1)
        peer = Liar(w.link, theirs.side(producer=False))
        await ask(w.link, peer.side, REQUEST)
        out.ready()
        while (await w.link.receive()).type != SEGMENT:
            pass
        peer.say(SEGMENT_ACK, segments)
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
        await ask(w.link, side, REQUEST)
        out.ready()
        out.finish()
        await consume(w.link, side, REQUEST)
        w.link.send(SEGMENT_ACK, [1], request=REQUEST)
        w.link.send(FAIL, 36, "too late", request=REQUEST)
        assert (await out).complete
        assert theirs.values() == stamps()
        await asyncio.gather(w.connection.send(5, b""), out.drained())
