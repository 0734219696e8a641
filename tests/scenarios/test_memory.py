"""R19, R49: who may use which blocks, and when."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest

import kvwire
from kvwire.limits import LANDED_BOXES_MAX, MIB
from tests.support import inside
from tests.support.caches import LARGE, SPEC, Memory, same
from tests.support.world import World, held, scenario


@scenario(chunk_bytes=16 * MIB, quarantine_bytes=MIB)
async def test_r19_a_stalled_writer_keeps_the_blocks_and_nothing_else(w: World) -> None:
    out, inc = w.begin_large(16)
    out.ready(layers=0)
    # In the middle of a chunk of 16 MiB.
    await w.turns_until(lambda: held(w.d))
    w.freeze(w.pull_side)
    inc.abort("the engine waits no longer")
    outcome = await inc
    assert not outcome.complete
    # Nobody is held up, and nothing is released: it is in quarantine.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await inc.drained()
    assert w.d.quarantined_bytes == 16 * LARGE.layer_block_bytes
    # While it is full, no verb begins anything.
    for verb in (w.d.publish, w.d.expect, w.pull_side.pull, w.pull_side.push):
        with pytest.raises(kvwire.UsageError, match="quarantine_bytes=1048576"):
            verb("u", w.target.cache, [0])
    # Only the end of the link proves that nothing writes there any more.
    w.cut()
    await inc.drained()
    assert not w.d.quarantined_bytes
    w.d.publish("u", w.target.cache, [0]).abort()
    out.abort()


@scenario()
async def test_the_rest_of_a_landed_block_is_written_until_it_has_drained(
    w: World,
) -> None:
    """A report of what has landed has a bound; what is beyond it is sent again."""
    count = 1 + LANDED_BOXES_MAX  # each second one of two layers: too many boxes
    w.source, w.target = Memory(SPEC, count), Memory(SPEC, count)
    w.source.stamp(range(count))
    tokens = (count - 1) * SPEC.block_tokens + 1
    out = w.p.publish("t", w.source.cache, range(count), tokens=tokens)
    inc = w.pull_side.pull("t", w.target.cache, range(count), tokens=tokens)
    out.ready(layers=0, blocks=0)
    first = w.target.tensors[0][0]
    await w.until(lambda: np.array_equal(first, w.source.tensors[0][0]))
    w.freeze(w.push_side)  # no acknowledgement reaches the producer
    for layer in (0, 2):
        for block in range(0 if layer else 2, count, 2):
            out.ready(layers=layer, blocks=block)
    mine, theirs = w.target.tensors[2][-1], w.source.tensors[2][-1]
    await w.until(lambda: np.array_equal(mine, theirs))
    mine[:, 1:] = 9  # the next token, too early
    w.cut()
    for layer in range(SPEC.layers):
        for block in range(layer in (0, 2), count, 1 + (layer in (0, 2))):
            out.ready(layers=layer, blocks=block)
    out.finish()
    assert (await inc).complete
    assert np.array_equal(mine, theirs), "what was written too early is lost"
    await inc.drained()
    mine[:, 1:] = 9  # nobody writes there any more
    await out.drained()


@scenario()
async def test_r49_the_producer_frees_while_its_last_layers_are_queued(
    w: World,
) -> None:
    source = Memory(LARGE, 8)
    source.stamp(range(8))
    kept = Memory(LARGE, 8)
    kept.stamp(range(8))
    w.target = Memory(LARGE, 8)
    out = w.p.publish("t", source.cache, range(8))
    inc = w.pull_side.pull("t", w.target.cache, range(8))
    await w.until(lambda: inside.planned(inc))
    thaw = w.freeze(w.pull_side)
    alive = weakref.ref(source.tensors[-1])
    out.ready()
    out.finish()
    # The engine lets go of everything; the bytes are still on their way.
    del source, out
    gc.collect()
    assert alive() is not None
    thaw()
    assert (await inc).complete
    assert same(kept, range(8), w.target, range(8))
    await w.until(lambda: not inside.registry(w.p).live)
    gc.collect()
    assert alive() is None, "and are held no longer than that"


GIVES_UP = pytest.mark.parametrize("gives_up", ["nobody", "producer", "consumer"])
PUSH = pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])


@GIVES_UP
@PUSH
@scenario("tcp")
async def test_so_are_those_with_a_codec(w: World, push: bool, gives_up: str) -> None:
    """They have memory of their own, as large as what was encoded."""
    await expect_freed(w, {"codec": "int8"}, gives_up, push=push)


async def expect_freed(
    w: World, options: dict[str, str], gives_up: str, *, push: bool
) -> None:
    gc.disable()
    try:
        out, inc = w.begin(options, options, push=push)
        out.ready(layers=0)
        await inc.layer(0)
        if gives_up != "nobody":
            (out if gives_up == "producer" else inc).abort()
        else:
            out.ready(layers=slice(1, None))
            out.finish()
        assert (await inc).complete == (await out).complete == (gives_up == "nobody")
        await asyncio.gather(out.drained(), inc.drained())
        ends: list[weakref.ref[object]]
        ends = [weakref.ref(out), weakref.ref(inc)]
        del out, inc
        await w.until(lambda: not any(end() for end in ends))
    finally:
        gc.enable()
