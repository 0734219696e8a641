"""A client written from the protocol pages alone moves KV to and from kvwire."""

from __future__ import annotations

import ast
import asyncio
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

import kvwire
from kvwire.kv.canonical import negotiate
from kvwire.proto.auth import Keys
from kvwire.proto.framing import Framing
from kvwire.security.keys import read_key_file, write_key_file
from kvwire.transfers.offer import TransferOffer
from kvwire.types import Role
from kvwire.wire.control import Ping, encode_body
from kvwire.wire.handshake_messages import key_id as kvwire_key_id
from kvwire.wire.header import FrameType
from tests.protocol import raw_client as raw
from tests.protocol.examples import KEY, NONCES, examples, sides
from tests.protocol.raw_plan import Misfit
from tests.protocol.world import (
    LAYERS,
    TOKENS,
    Ours,
    Theirs,
    World,
    begun,
    expected,
    layers_of,
    stamps,
    world,
)
from tests.support.pairs import until
from tests.support.tree import python

Short = Literal["NHD", "HND"]

HASHES = [bytes([number]) * number for number in range(1, 7)]

every_shape = pytest.mark.parametrize(
    ("layout", "block_tokens", "order", "their_tokens", "asked_here"),
    [
        ("NHD", 8, "layer block kv token head dim", 8, True),
        ("NHD", 4, "layer block kv head token dim", 8, False),
        ("HND", 8, "block layer token kv head dim", 6, True),
        ("HND", 16, "dim token block kv head layer", 4, False),
    ],
)


def published(w: World, ours: Ours, **more: Any) -> kvwire.Outgoing:
    """All of a cache of kvwire, to whoever asks."""
    ours.fill()
    out = w.ours.publish("x", ours.cache, ours.ids, tokens=TOKENS, **more)
    out.ready()
    out.finish()
    return out


async def pulled(w: World, side: raw.Side, request: int = 1) -> None:
    """Ask for it, and receive it."""
    await raw.ask(w.link, side, request)
    await raw.consume(w.link, side, request)


@every_shape
async def test_kvwire_sends(
    layout: Short, block_tokens: int, order: str, their_tokens: int, asked_here: bool
) -> None:
    """Other layouts and block sizes, asked by either side: every byte is in place."""
    async with world() as w:
        ours, theirs = Ours(layout, block_tokens), Theirs(order, their_tokens)
        ours.fill()
        send = w.connection.push if asked_here else w.ours.publish
        out = send("x", ours.cache, ours.ids, tokens=TOKENS)
        out.ready()
        out.finish()
        side = theirs.side(producer=False)
        request = await begun(w.link, side, 0 if asked_here else 1)
        await raw.consume(w.link, side, request)
        assert side.complete
        assert (await out).complete
        assert theirs.values() == stamps()


@every_shape
async def test_kvwire_receives(
    layout: Short, block_tokens: int, order: str, their_tokens: int, asked_here: bool
) -> None:
    """The other way."""
    async with world() as w:
        ours, theirs = Ours(layout, block_tokens), Theirs(order, their_tokens)
        theirs.fill()
        take = w.connection.pull if asked_here else w.ours.expect
        inc = take("x", ours.cache, ours.ids, tokens=TOKENS)
        side = theirs.side(producer=True)
        request = await begun(w.link, side, 0 if asked_here else 1)
        await raw.produce(w.link, side, request, layers_of(side))
        assert (await inc).complete
        assert ours.values() == stamps()


@pytest.mark.parametrize("produces", [False, True])
async def test_segments_of_several_chunks(produces: bool) -> None:
    """69 KiB in chunks of 64 KiB, four bytes an element."""
    large: dict[str, Any] = {"dim": 100, "dtype": "float32"}
    async with world() as w:
        ours, theirs = Ours(**large), Theirs(**large)
        if produces:
            inc, side = await expected(w, ours, theirs)
            box = (0, 0, LAYERS, 0, side.groups[0].granules)
            await raw.produce(w.link, side, 1, [box])
            assert (await inc).complete
        else:
            published(w, ours)
            side = theirs.side(producer=False)
            await pulled(w, side)
            assert len(side.landed) == 1
        filled = ours if produces else theirs
        assert filled.values() == stamps(dim=100)


async def test_with_a_key(tmp_path: Path) -> None:
    """Sealed control frames in both directions; another key is refused."""
    path = tmp_path / "key"
    write_key_file(path)
    async with world(read_key_file(str(path)), trust="psk", psk_file=str(path)) as w:
        ours, theirs = Ours(), Theirs()
        published(w, ours)
        side = theirs.side(producer=False)
        await pulled(w, side)
        assert theirs.values() == stamps()
        with pytest.raises(raw.Refused) as refused:
            await raw.RawLink.connect(w.address.host, w.address.port, psk=bytes(32))
        assert refused.value.code == raw.AUTHENTICATION


@pytest.mark.parametrize("claims", [False, True])
async def test_kvwire_receives_a_part(claims: bool) -> None:
    """What was not marked is missing, also where COMMIT says otherwise."""
    async with world() as w:
        ours = Ours()
        inc, side = await expected(w, ours, Theirs())
        await raw.produce(w.link, side, 1, layers_of(side)[:1], complete=claims)
        outcome = await inc
        assert not outcome.complete
        assert not outcome.landed
        assert set(outcome.missing.layers(ours.names[0])) == {1}
        assert ours.values() == stamps(lambda element: element.layer == 0)


async def test_kvwire_sends_a_part() -> None:
    """The first two of six blocks, and a COMMIT that is not complete."""
    async with world() as w:
        ours, theirs = Ours(), Theirs()
        ours.fill()
        out = w.ours.publish("x", ours.cache, ours.ids, tokens=TOKENS)
        out.ready(blocks=slice(0, 2))
        out.finish(partial=True)
        side = theirs.side(producer=False)
        await pulled(w, side)
        assert not side.complete
        assert not (await out).complete
        assert theirs.values() == stamps(lambda element: element.token < 8)


async def test_a_damaged_chunk() -> None:
    """COMMIT_ACK names its segment, and the consumer lacks its blocks."""
    async with world() as w:
        ours = Ours()
        inc, side = await expected(w, ours, Theirs())
        boxes = layers_of(side)
        await raw.produce(w.link, side, 1, boxes, spoiled=[2])
        assert (side.landed, side.damaged) == (boxes[:1], boxes[1:])
        outcome = await inc
        assert not outcome.landed
        assert set(outcome.missing.layers(ours.names[0])) == {1}


def _another_model(**spec: Any) -> bytes:
    return Theirs(**spec).side(producer=False).description()


@pytest.mark.parametrize(
    ("description", "named"),
    [
        (_another_model(dtype="int8"), "dtype"),
        (_another_model(dim=8), "head_dim"),
        (_another_model(model_layers=3), "layers"),
        (_another_model(components=1), "components"),
        (_another_model(shard_rank=1, shard_size=2, model_kv_heads=4), "kv_heads"),
        (_another_model()[:-1], "description"),
        (b"", "description"),
    ],
)
async def test_kvwire_refuses(description: bytes, named: str) -> None:
    """With PROFILE and the fields; the connection goes on."""
    async with world() as w:
        ours = Ours()
        out = w.ours.publish("x", ours.cache, ours.ids, tokens=TOKENS)
        w.link.send(raw.OPEN, b"sx", True, 0, description, request=1)
        frame = await w.link.receive()
        assert (frame.type, frame.fields[0]) == (raw.FAIL, raw.PROFILE)
        assert named in frame.fields[1]
        out.abort()
        assert not (await out).landed


async def test_the_client_refuses() -> None:
    """kvwire's side ends with the reason that FAIL gives."""
    async with world() as w:
        ours, theirs = Ours(), Theirs(dtype="int8")
        inc = w.connection.pull("x", ours.cache, ours.ids, tokens=TOKENS)
        with pytest.raises(Misfit, match="kv"):
            await begun(w.link, theirs.side(producer=True), 0)
        outcome = await inc
        assert not outcome.landed
        assert "kv" in str(outcome.missing[ours.names[0]])


async def test_too_late() -> None:
    """A peer that never came is told why the transfer has ended."""
    async with world() as w:
        ours, theirs = Ours(), Theirs()
        out = w.ours.publish("x", ours.cache, ours.ids, tokens=TOKENS)
        out.abort("not needed")
        with pytest.raises(raw.Refused, match="not needed") as refused:
            await raw.ask(w.link, theirs.side(producer=False), 1)
        assert refused.value.code == raw.CANCELLED


@pytest.mark.parametrize("produces", [False, True])
async def test_only_what_the_consumer_lacks(produces: bool) -> None:
    """With hashes on both sides; blocks 1 and 4 of six are there already."""
    have = [number in (1, 4) for number in range(6)]
    async with world() as w:
        ours, theirs = Ours(block_tokens=4), Theirs(block_tokens=4)
        lists: dict[str, Any] = {"hashes": HASHES, "tokens": TOKENS}
        if produces:
            theirs.fill()
            held = [HASHES[1], HASHES[4]]
            inc = w.ours.expect("x", ours.cache, ours.ids, have=held, **lists)
            side = theirs.side(producer=True, hashes={"kv": HASHES})
            await raw.ask(w.link, side, 1)
            await raw.produce(w.link, side, 1, layers_of(side))
            assert (await inc).complete
        else:
            out = published(w, ours, hashes=HASHES)
            side = theirs.side(producer=False, hashes={"kv": HASHES}, have={"kv": have})
            await pulled(w, side)
            assert (await out).complete
        filled = ours if produces else theirs
        assert filled.values() == stamps(lambda e: not have[e.token // 4])


async def test_without_hashes_of_both_everything_moves() -> None:
    """``have`` alone says nothing."""
    async with world() as w:
        ours, theirs = Ours(block_tokens=4), Theirs(block_tokens=4)
        published(w, ours)
        hashes, have = {"kv": HASHES}, {"kv": [True] * 6}
        side = theirs.side(producer=False, hashes=hashes, have=have)
        await pulled(w, side)
        assert theirs.values() == stamps()


async def test_other_hashes_are_refused() -> None:
    """They are of other tokens, or of other blocks."""
    async with world() as w:
        ours, theirs = Ours(block_tokens=4), Theirs(block_tokens=4)
        out = w.ours.publish(
            "x", ours.cache, ours.ids, tokens=TOKENS, hashes=HASHES[::-1]
        )
        side = theirs.side(producer=False, hashes={"kv": HASHES})
        with pytest.raises(raw.Refused, match="hashes") as refused:
            await raw.ask(w.link, side, 1)
        assert refused.value.code == raw.PROFILE
        out.abort()


def _of_head(head: int) -> list[int]:
    return stamps(lambda element: element.head == head)


async def test_shards_each_get_their_heads() -> None:
    """Two consumers of one transfer, with one head each of the producer's two."""
    async with world() as w:
        ours = Ours()
        out = published(w, ours, consumers=2)
        for rank in range(2):
            theirs = Theirs(kv_heads=1, shard_rank=rank, shard_size=2)
            side = theirs.side(producer=False)
            await pulled(w, side, 1 + 2 * rank)
            assert theirs.values() == _of_head(rank)
        assert (await out).complete


async def test_a_lost_link() -> None:
    """The next connection brings what has not landed, and nothing twice."""
    async with world() as w:
        ours, theirs = Ours(), Theirs()
        ours.fill()
        out = w.ours.publish("x", ours.cache, ours.ids, tokens=TOKENS)
        out.ready(layers=0)
        side = theirs.side(producer=False)
        await raw.ask(w.link, side, 1)
        first = asyncio.ensure_future(raw.consume(w.link, side, 1))
        await until(lambda: side.landed)
        first.cancel()
        before = list(side.landed)
        w.link = await lost(w.link, w.address)
        await raw.ask(w.link, side, 1)
        out.ready(layers=1)
        out.finish()
        await raw.consume(w.link, side, 1)
        assert {box[1] for box in side.landed[len(before) :]} == {1}
        assert (await out).complete
        assert theirs.values() == stamps()


async def test_a_lost_last_word() -> None:
    """COMMIT_ACK never came: it is said on the next connection, and nothing is sent."""

    class Cut(raw.RawLink):
        """Ends the connection where COMMIT_ACK would be sent."""

        def send(self, frame_type: int, *fields: Any, request: int = 0) -> None:
            if frame_type == raw.COMMIT_ACK:
                self.abort()
            else:
                super().send(frame_type, *fields, request=request)

    async with world() as w:
        ours, theirs = Ours(), Theirs()
        out = published(w, ours)
        side = theirs.side(producer=False)
        cut = await Cut.connect(w.address.host, w.address.port)
        await raw.ask(cut, side, 1)
        with pytest.raises(EOFError):
            await raw.consume(cut, side, 1)
        landed = list(side.landed)
        await pulled(w, side)
        assert side.landed == landed
        assert (await out).complete
        assert theirs.values() == stamps()


async def lost(link: raw.RawLink, address: kvwire.Address) -> raw.RawLink:
    """Ends a link without a word, and makes another that takes its place."""
    link.abort()
    resumes = link.digest[:16]
    return await raw.RawLink.connect(address.host, address.port, resumes=resumes)


# --- the page's worked examples are what the client makes, and kvwire reads them so ---


CLIENT = ("raw_plan", "raw_client")
THIRD_PARTIES = {"msgspec", "xxhash"}


def test_kvwire_makes_the_same_frames() -> None:
    """Checked and sealed, with the keys that the page names."""
    keys = Keys.derive(KEY, NONCES[:32], NONCES[32:])
    frames = examples()["frames"].replace(" ", "").replace("\n", "")
    framing = Framing()
    framing.sent = 5
    body = encode_body(Ping(7))
    assert b"".join(framing.control(FrameType.PING, body)).hex() in frames
    framing.sent = 5
    framing.use_seals(Role.CLIENT, keys.seal)
    assert b"".join(framing.control(FrameType.PING, body)).hex() in frames
    for key in (kvwire_key_id(KEY), keys.accept, keys.seal[Role.CLIENT]):
        assert key.hex() in frames


def test_kvwire_reads_the_same_descriptions() -> None:
    """Both of the example, byte for byte; and takes the same order."""
    producer, consumer = sides()
    geometries = []
    for side in (producer, consumer):
        read = TransferOffer.decode(side.description())
        assert read.encode() == side.description()
        geometries.append(read.read_geometry())
    producer.meet(consumer.description())
    (walk,) = negotiate(geometries[0], geometries[1])
    assert walk.order == producer.groups[0].order
    assert walk.order == geometries[1].groups[0].order != geometries[0].groups[0].order


def test_the_client_has_nothing_of_kvwire() -> None:
    """It imports itself, the standard library, and two codecs."""
    own = {f"tests.protocol.{name}" for name in CLIENT}
    read = 0
    for source in python("tests/protocol/raw_"):
        read += 1
        for node in ast.walk(source.syntax):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                allowed = sys.stdlib_module_names | THIRD_PARTIES
                assert name in own or name.partition(".")[0] in allowed, source.path
    assert read == len(CLIENT)
