"""The producer's end: finishing, giving up, several consumers, marks that wait."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

import kvwire
from tests.support import inside
from tests.support.caches import LAYERS, RANKS, SPEC, Memory
from tests.support.waiting import PATIENCE_S
from tests.support.world import DEST, LIST, World, scenario


@scenario()
async def test_a_block_that_is_left_by_an_exception_aborts(w: World) -> None:
    inc = w.d.expect("t", w.target.cache, DEST)
    out = w.push_side.push("t", w.source.cache, LIST)

    async def prefill() -> None:
        async with out:
            out.ready(layers=0)
            await inc.layer(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await prefill()
    outcome = await inc
    assert "ZeroDivisionError in the producer" in outcome.missing["kv", DEST[0]]
    assert (await out).missing["kv", LIST[0]] == "ZeroDivisionError in the producer"


@scenario("inproc")
async def test_a_block_that_has_marked_nothing_aborts(w: World) -> None:
    """Preempted in its last step: an empty hand-over is an error, on both sides."""
    out, inc = w.begin()
    with pytest.raises(kvwire.UsageError, match="never marked ready"):
        async with out:
            pass
    assert "never marked ready" in (await inc).missing["kv", DEST[0]]


@scenario("inproc")
async def test_a_block_of_a_transfer_that_has_ended(w: World) -> None:
    """It is no mistake of the producer, so nothing is raised."""
    inc = w.pull_side.pull("t", w.target.cache, DEST)
    async with w.p.publish("t", w.source.cache, LIST) as out:
        out.ready(layers=0)
        inc.abort("not needed")
        await out
        out.ready(layers=1)
    assert out.done()
    out.finish()


@scenario("inproc")
async def test_a_block_that_was_finished_inside(w: World) -> None:
    """Its end has nothing to add, be it that a part was left out."""
    async with w.p.publish("t", w.source.cache, LIST) as out:
        out.ready(layers=0)
        out.finish(partial=True)
    inc = w.pull_side.pull("t", w.target.cache, DEST)
    await inc.layer(0)
    outcome = await inc
    assert outcome.missing.layers(("kv", DEST[0])) == tuple(range(1, LAYERS))
    assert "not marked ready" in outcome.missing["kv", DEST[0]]
    out.finish()


@scenario()
async def test_a_tensor_parallel_group_of_consumers(w: World) -> None:
    """Each rank takes its heads, into blocks of another size and layout."""
    out = w.p.publish("t", w.source.cache, [3, 1, 4, 5], consumers=2)
    ranks = []
    for spec in RANKS:
        connection = await w.d.connect(w.address)
        # HND, and 8 tokens a block where the producer has 4.
        tensors = [np.zeros((6, 2, 1, 8, 16), np.float32) for _ in range(LAYERS)]
        cache = kvwire.PagedCache(replace(spec, block_tokens=8), tensors, layout="HND")
        ranks.append((tensors, connection.pull("t", cache, [5, 2])))
    for layer in range(LAYERS):
        out.ready(layers=layer)
    out.finish()
    assert (await out).complete
    for rank, (tensors, inc) in enumerate(ranks):
        assert (await inc).complete
        for layer in range(LAYERS):
            for place, pair in ((5, (3, 1)), (2, (4, 5))):
                both = [w.source.tensors[layer][block] for block in pair]
                # (kv, token, head, dim) of two blocks, and (kv, head, token, dim).
                expected = np.concatenate(both, axis=1)[:, :, rank]
                found = tensors[layer][place][:, 0]
                np.testing.assert_array_equal(found, expected)


@scenario("inproc")
async def test_consumers_that_want_other_tokens(w: World) -> None:
    """What one of them takes for a prompt is not what the other one does."""
    out = w.p.publish("t", w.source.cache, LIST, consumers=2)
    first = w.pull_side.pull("t", w.target.cache, DEST, tokens=18)
    await w.until(lambda: inside.planned(first))
    second = w.pull_side.pull("t", w.target.cache, [20, 21, 22, 23, 24], tokens=19)
    for end in (first, second, out):
        assert not (await end).complete
    assert "tokens" in (await second).missing["kv", 20]


@pytest.mark.parametrize("marked", [0, 1, LAYERS])
@scenario("inproc", restart_grace_s=0.05)
async def test_a_consumer_that_is_gone_ends_the_whole_group(
    w: World, marked: int
) -> None:
    """As soon as its grace is over, whatever the other consumers were doing."""
    async with kvwire.open(name="gone", resume=False) as third:
        lost = await third.connect(w.address)
        out = w.p.publish("t", w.source.cache, LIST, consumers=2)
        first = w.pull_side.pull("t", w.target.cache, DEST)
        second = lost.pull("t", Memory(SPEC).cache, DEST)
        await w.until(lambda: inside.planned(first) and inside.planned(second))
        for layer in range(marked):
            out.ready(layers=layer)
        if marked:
            await first.layer(0)
        lost.abort("killed")
        async with asyncio.timeout(PATIENCE_S):
            outcome = await out
        assert not outcome.complete
        assert "was reset, and it was not back within" in str(outcome.missing.reasons)
        for consumer in (first, second):
            assert (await consumer).complete is (marked == LAYERS)
        await out.drained()


@scenario("inproc")
async def test_closing_one_consumer_s_connection_after_it_was_served(w: World) -> None:
    """It carries nothing any more, so the others are not ended with it."""
    other = await w.d.connect(w.address)
    other_end = await w.p.accept()
    small = Memory(SPEC)
    out = w.p.publish("t", w.source.cache, LIST, consumers=2)
    first = other.pull("t", small.cache, DEST, have=hashes(), hashes=hashes())
    second = w.pull_side.pull("t", w.target.cache, DEST)
    await w.until(lambda: inside.planned(first) and inside.planned(second))
    out.ready()
    out.finish()
    assert (await first).complete
    await asyncio.gather(other.close(), other_end.close())
    assert (await second).complete
    assert (await out).complete


def hashes() -> list[bytes]:
    return [b"%d" % n for n in range(len(LIST))]


# --- growing lists --------------------------------------------------------------------

TOKENS = len(LIST) * SPEC.block_tokens - 1


@scenario("inproc")
async def test_a_block_that_is_not_named_is_not_marked(w: World) -> None:
    out = w.p.publish("t", w.source.cache, LIST[:2], tokens=TOKENS, growing=True)
    with pytest.raises(kvwire.UsageError, match="only 2 are listed"):
        out.ready(layers=0)
    with pytest.raises(kvwire.UsageError, match="never marked"):
        out.finish()
    out.abort()
    outcome = await out
    # A position that was never named is no block: it is counted apart.
    assert outcome.missing.ids().tolist() == LIST[:2]
    assert len(outcome.missing) == len(dict(outcome.missing)) == 2
    assert outcome.unnamed == len(LIST) - 2
    assert ("kv", -1) not in outcome.missing


@scenario("inproc")
async def test_a_growing_transfer_that_ends_after_a_plan(w: World) -> None:
    """Of two consumers, whose outcomes are joined; one has what is not named."""
    connection = await w.d.connect(w.address)
    names, cache = hashes(), w.source.cache
    out = w.p.publish(
        "t", cache, LIST[:2], tokens=TOKENS, growing=True, hashes=names, consumers=2
    )
    first = w.pull_side.pull("t", w.target.cache, DEST, tokens=TOKENS)
    second = connection.pull(
        "t",
        Memory(SPEC).cache,
        DEST,
        tokens=TOKENS,
        hashes=names,
        have=names[2:],
    )
    out.ready(blocks=0)
    await w.until(lambda: inside.planned(first) and inside.planned(second))
    out.abort("enough")
    outcome = await out
    assert not outcome.complete
    assert outcome.unnamed == len(LIST) - 2
    assert {*outcome.missing, *outcome.landed} == {("kv", block) for block in LIST[:2]}
    assert "enough" in outcome.missing.reasons
    assert len((await first).missing) + len((await first).landed) == len(LIST)
    assert (await first).unnamed == 0


@scenario("inproc")
async def test_a_consumer_has_what_was_never_named(w: World) -> None:
    names = hashes()
    out = w.p.publish(
        "t", w.source.cache, LIST[:2], tokens=TOKENS, growing=True, hashes=names
    )
    inc = w.pull_side.pull(
        "t", w.target.cache, DEST, tokens=TOKENS, hashes=names, have=names[2:]
    )
    out.ready(blocks=slice(0, 2))
    out.finish(partial=True)
    assert (await inc).complete
    outcome = await out
    assert outcome.complete
    assert {*outcome.landed} == {("kv", block) for block in LIST[:2]}
    assert outcome.unnamed == len(LIST) - 2


@scenario("inproc")
async def test_names_that_cannot_be(w: World) -> None:
    cache = w.source.cache
    with pytest.raises(kvwire.UsageError, match="tokens="):
        w.p.publish("t", cache, LIST, growing=True)
    with pytest.raises(kvwire.UsageError, match="exceed the 1 blocks"):
        w.p.publish("t", cache, LIST, tokens=1, growing=True)
    out = w.p.publish("t", cache, LIST[:2], tokens=TOKENS, growing=True)
    for blocks, said in (
        (LIST[:1], f"block {LIST[0]} .* is already listed"),
        ([20, 21, 22, 23], "2 of 5 are already listed"),
        ([10_000], "out of range"),
    ):
        with pytest.raises(kvwire.UsageError, match=said):
            out.extend(blocks)
    fixed = w.p.publish("u", cache, LIST)
    with pytest.raises(kvwire.UsageError, match="growing=True"):
        fixed.extend([20])
