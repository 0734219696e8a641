"""R33, R36, R43, R44: how peers meet, and what keeps them apart."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

import kvwire
from kvwire.kv.hashing import HashScheme
from kvwire.limits import MIB
from kvwire.wire.header import Flag, FrameType, encode_header
from tests.fault.stranger import dial
from tests.support.caches import BLOCKS, SPEC, same
from tests.support.cases import each
from tests.support.world import DEST, LIST, World, scenario


@scenario()
async def test_r33_a_storm_of_handshakes(w: World) -> None:
    # Each connect is a connection of its own; none waits for another's handshake.
    timeout_s = w.d.config.handshake_timeout_s
    async with asyncio.timeout(timeout_s):
        burst = await asyncio.gather(*(w.d.connect(w.address) for _ in range(64)))
    assert len(set(burst)) == 64
    incoming = []
    for number, connection in enumerate(burst[:8]):
        out = w.p.publish(number, w.source.cache, [number])
        out.ready()
        out.finish()
        incoming.append(connection.pull(number, w.target.cache, [number]))
    assert all([(await inc).complete for inc in incoming])
    assert same(w.source, range(8), w.target, range(8))


@scenario()
async def test_r36_the_decode_pool_is_full(w: World) -> None:
    # One transfer runs; forty more are pushed, and there is memory for none.
    running = w.d.expect("running", w.target.cache, [0])
    first = w.push_side.push("running", w.source.cache, [0])
    pushed = []
    for number in range(40):
        out = w.push_side.push(number, w.source.cache, [number % BLOCKS])
        out.ready()
        out.finish()
        pushed.append(out)
    first.ready()
    first.finish()
    assert (await running).complete, "those who wait hold up nobody"
    assert not any(out.done() for out in pushed)
    assert w.target.free(range(1, BLOCKS)), "no byte comes before there is memory"
    # Blocks come free two at a time, in another order than they were asked for.
    for number in reversed(range(0, 40, 2)):
        pair = [
            w.d.expect(number, w.target.cache, [30]),
            w.d.expect(number + 1, w.target.cache, [31]),
        ]
        for inc in pair:
            assert (await inc).complete
            await inc.drained()
    assert all([(await out).complete for out in pushed])
    assert (await first).complete


@each(
    "said",
    {
        "no header of kvwire": b"GET / HTTP/1.1\r\nHost: kvwire\r\n\r\n",
        "a damaged header": b"\x01" + bytes(31),
        "16 MiB before the handshake": encode_header(
            FrameType.DATA, Flag.CHECKED, 0, 16 * MIB, 1
        ),
        "64 KiB before the handshake": encode_header(
            FrameType.OPEN, Flag.CHECKED, 0, 65_536, 1
        ),
        "a HELLO of zeros": encode_header(FrameType.HELLO, Flag.CHECKED, 0, 224)
        + bytes(224),
    },
)
@scenario("tcp")
async def test_r43_what_is_no_handshake_costs_nothing(w: World, said: bytes) -> None:
    async with dial(w.address, shake=False) as stranger:
        tracemalloc.start()
        try:
            await stranger.say(said)
            await stranger.expect_gone()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < MIB, "nothing is allocated by the size it named"
    assert await w.moves("t", LIST, DEST)


@scenario(profile=dict(HashScheme(SPEC.block_tokens, b"one").to_pairs()))
async def test_r44_hashes_of_another_scheme_are_no_cold_cache(w: World) -> None:
    tokens = list(range(5 * SPEC.block_tokens))
    mine = HashScheme(SPEC.block_tokens, b"one").block_hashes(tokens)
    theirs = HashScheme(SPEC.block_tokens, b"two").block_hashes(tokens)
    out, inc = w.begin({"hashes": mine}, {"hashes": theirs, "have": theirs})
    out.ready()
    for end in (out, inc):
        outcome = await end
        assert not outcome.complete
        assert all("hashes" in reason for reason in outcome.missing.values())
    # Told to the handshake, the scheme keeps the two apart from the start.
    for seed, names in ((b"two", "hash_seed"), (b"one", "")):
        profile = dict(HashScheme(SPEC.block_tokens, seed).to_pairs())
        async with kvwire.open(name="decode-1", profile=profile) as other:
            if names:
                with pytest.raises(kvwire.ProfileMismatch, match=names):
                    await other.connect(w.address)
            else:
                assert not (await other.connect(w.address)).closed
