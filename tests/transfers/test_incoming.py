"""The consumer's end: gates, memory it cannot use, what it has, where its time went."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import kvwire
from tests.support import inside
from tests.support.caches import LARGE, LAYERS, SPEC, Memory, same
from tests.support.proxy import Direction, Proxy
from tests.support.world import DEST, LIST, World, scenario, world

HASHES = [b"%d" % n for n in range(len(LIST))]


@pytest.mark.parametrize("order", list(permutations(range(LAYERS)))[::5], ids=str)
@scenario("inproc")
async def test_gates_open_in_the_order_of_the_marks(
    w: World, order: tuple[int, ...]
) -> None:
    out, inc = w.begin({"group_bytes": 1})
    opened: list[int] = []

    async def gate(layer: int) -> None:
        await inc.layer(layer)
        assert same(w.source, LIST, w.target, DEST, layers=[layer])
        opened.append(layer)

    gates = [asyncio.create_task(gate(layer)) for layer in range(LAYERS)]
    for count, layer in enumerate(order, 1):
        out.ready(layers=layer)
        await w.until(lambda count=count: len(opened) == count)  # type: ignore[misc]
    assert opened == list(order)
    out.finish()
    await asyncio.gather(*gates)
    assert (await inc).complete
    await inc.layer(0)


@pytest.mark.parametrize("layer", [True, 1.0, "1"])
@scenario("inproc")
async def test_a_layer_that_is_no_number(w: World, layer: Any) -> None:
    _, inc = w.begin()
    await w.until(lambda: inc.met)
    with pytest.raises(
        kvwire.UsageError, match=f"layer {layer!r}: pass the layer's index"
    ):
        inc.layer_landed(layer)
    with pytest.raises(
        kvwire.UsageError, match=f"layer {layer!r}: pass the layer's index"
    ):
        await inc.layer(layer)
    inc.abort()


@scenario("inproc")
async def test_a_gate_that_nothing_has_to_come_for(w: World) -> None:
    """What is not carried, or was here before, is not waited for."""
    stage = replace(SPEC, layers=2, first_layer=2, model_layers=LAYERS)
    half = kvwire.PagedCache(stage, w.source.tensors[2:])
    out = w.p.publish("stage", half, LIST)
    inc = w.pull_side.pull("stage", w.target.cache, DEST)
    met = [inc.met]
    await inc.layer(0)
    assert [*met, inc.met] == [False, True]
    assert not inc.layer_landed(2)
    out.abort()
    all_here: dict[str, Any] = {"hashes": HASHES, "have": HASHES}
    out = w.p.publish("have", w.source.cache, LIST, hashes=HASHES)
    inc = w.pull_side.pull("have", w.target.cache, DEST, **all_here)
    for layer in range(LAYERS):
        await inc.layer(layer)
    out.ready()
    out.finish()
    outcome = await inc
    assert outcome.complete
    assert outcome.nbytes == 0
    assert w.target.free(DEST)


def abort_here(w: World, inc: kvwire.Incoming, out: kvwire.Outgoing) -> None:
    inc.abort("the user left")


def abort_there(w: World, inc: kvwire.Incoming, out: kvwire.Outgoing) -> None:
    out.abort("prefill broke")


def finish_short(w: World, inc: kvwire.Incoming, out: kvwire.Outgoing) -> None:
    out.finish(partial=True)


def wait_for_deadline(w: World, inc: kvwire.Incoming, out: kvwire.Outgoing) -> None:
    """Nothing to do: virtual time goes on by itself."""


def lose_link(w: World, inc: kvwire.Incoming, out: kvwire.Outgoing) -> None:
    w.pull_side.abort("cut by the test")


def close_here(w: World, inc: kvwire.Incoming, out: kvwire.Outgoing) -> None:
    inside.registry(w.d).closing()


def damage(w: World, inc: kvwire.Incoming, out: kvwire.Outgoing) -> None:
    core: Any = inside.core(w.pull_side)
    received = core.body_received

    def damaging(arrival: Any, now: float, **more: Any) -> None:
        received(arrival, now, **{**more, "intact": not arrival.header.segment})

    core.body_received = damaging
    out.ready()
    out.finish()


@pytest.mark.parametrize(
    ("end", "error", "reason"),
    [
        (abort_here, kvwire.RequestCancelled, "the user left"),
        (abort_there, kvwire.PeerCancelled, "prefill broke"),
        (finish_short, kvwire.PeerCancelled, "not marked ready"),
        (wait_for_deadline, kvwire.DeadlineExceeded, "deadline passed"),
        (lose_link, kvwire.ConnectionLost, "cut by the test"),
        (close_here, kvwire.ClosedOK, "this side has closed"),
        (damage, kvwire.IntegrityError, "arrived damaged"),
    ],
)
@scenario("inproc", resume=False)
async def test_a_gate_raises_what_ended_the_transfer(
    w: World,
    end: Callable[[World, kvwire.Incoming, kvwire.Outgoing], None],
    error: type[kvwire.KVWireError],
    reason: str,
) -> None:
    """Whoever waits for a layer when it ends, and whoever asks afterwards."""
    out, inc = w.begin(theirs={"deadline": 9.0})
    await w.turns_until(lambda: inside.planned(inc))
    gate = asyncio.create_task(inc.layer(0))
    await w.turns_until(lambda: bool(inc._gates))
    end(w, inc, out)
    for waiting in (gate, inc.layer(1)):
        with pytest.raises(error, match=f"did not land: .*{reason}") as caught:
            await waiting
        assert type(caught.value) is error


@pytest.mark.parametrize("by", ["collection", "predicate"])
def test_only_what_the_consumer_lacks_is_sent(by: str) -> None:
    """Bytes on the wire are counted, by a proxy between the two."""

    async def scenario() -> None:
        async with world("tcp") as w, Proxy(w.address) as proxy:
            w.source, w.target = Memory(LARGE, 8), Memory(LARGE, 8)
            w.source.stamp(range(8))
            connection = await w.d.connect(proxy.address)
            names = [b"block %d" % n for n in range(8)]
            here = {names[1], names[2], names[6]}
            have: Any = here if by == "collection" else here.__contains__
            before = proxy.passed[Direction.TO_CLIENT]
            out = w.p.publish("t", w.source.cache, range(8), hashes=names)
            inc = connection.pull(
                "t", w.target.cache, range(8), hashes=names, have=have
            )
            out.ready()
            out.finish()
            outcome = await inc
            assert outcome.complete
            assert (await out).complete
            lacking = [0, 3, 4, 5, 7]
            payload = len(lacking) * LARGE.block_bytes
            sent = proxy.passed[Direction.TO_CLIENT] - before
            assert outcome.nbytes == payload
            assert payload <= sent < payload + 16_384
            assert same(w.source, lacking, w.target, lacking)
            assert w.target.free([1, 2, 6])
            await connection.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("who", ["producer", "consumer"])
@scenario("inproc")
async def test_have_counts_only_with_hashes_on_both_sides(
    w: World, push: bool, who: str
) -> None:
    """Otherwise nobody knows that both mean the same blocks: everything is sent."""
    mine: dict[str, Any] = {"hashes": HASHES} if who == "producer" else {}
    theirs: dict[str, Any] = {}
    if who == "consumer":
        theirs = {"hashes": HASHES, "have": set(HASHES)}
    out, inc = w.begin(mine, theirs, push=push)
    out.ready()
    out.finish()
    assert (await inc).complete
    assert same(w.source, LIST, w.target, DEST)


@scenario("inproc")
async def test_a_list_too_long_to_say_what_is_here(w: World) -> None:
    """Found when it is offered, and not when the peer comes."""
    spec = kvwire.KVSpec(layers=1, kv_heads=1, head_dim=1, block_tokens=1, dtype="int8")
    count = 300_000
    cache = kvwire.PagedCache(spec, [np.zeros((count, 2, 1, 1, 1), np.int8)])
    names = [b"h"] * count
    for verb in (w.d.expect, w.pull_side.pull):
        with pytest.raises(kvwire.UsageError, match="or leave out have="):
            verb("t", cache, range(count), hashes=names, have={b"h"})
    assert not inside.registry(w.d).live
    w.d.expect("t", cache, range(count), hashes=names).abort()
