"""What users see of a transfer, and the shards of several producers as one."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import kvwire
from tests.scenarios.world import World, scenario
from tests.support import inside, virtual_time
from tests.support.caches import LAYERS, RANKS

BLOCKS = [10, 11, 12]
BOTH = pytest.mark.parametrize("transport", ["inproc", "tcp"])


@scenario("inproc")
async def test_a_lease_is_renewed_by_a_producer_that_knows_better(w: World) -> None:
    out = w.p.publish("t", w.source.cache, [1], lease_s=2.0)
    await virtual_time.pass_time(1.5)
    out.renew_lease()
    await virtual_time.pass_time(1.5)
    assert not out.done()
    await virtual_time.pass_time(1.0)
    assert out.done()
    out.renew_lease()
    assert not (await out).complete


@scenario("inproc")
async def test_two_views_of_one_transfer_are_equal(w: World) -> None:
    seen: list[object] = []
    w.p.watchers.add(Seen(seen))
    out = w.p.publish("t", w.source.cache, [1])
    other = w.p.publish("u", w.source.cache, [2])
    assert seen == [out, other]
    assert len({out, other, *seen}) == 2
    assert (out.id, other.id) == ("t", "u")
    out.abort()
    other.abort()


class Seen:
    """A watcher that keeps what it is given."""

    def __init__(self, transfers: list[object]) -> None:
        self._transfers = transfers

    def begun(self, transfer: object) -> None:
        self._transfers.append(transfer)

    def ended(self, transfer: object, outcome: object, connections: object) -> None:
        """Nothing to keep."""


class Shards:
    """Two ranks of a producer group, one head each, and one consumer of both."""

    def __init__(self, w: World) -> None:
        self.tensors = [
            [
                np.full((4, 2, 4, 1, 16), 10.0 * rank + layer, np.float32)
                for layer in range(LAYERS)
            ]
            for rank in (1, 2)
        ]
        self.outs, self.incs = [], []
        for rank, tensors in enumerate(self.tensors):
            cache = kvwire.PagedCache(RANKS[rank], tensors)
            self.outs.append(w.p.publish(rank, cache, [2, 0, 1]))
            self.incs.append(w.pull_side.pull(rank, w.target.cache, BLOCKS))


@scenario()
async def test_heads_are_merged_layer_by_layer(w: World) -> None:
    shards = Shards(w)
    joined = kvwire.join(*shards.incs)
    assert not shards.incs[0].carries, "it has not met its peer"
    for layer in range(LAYERS):
        shards.outs[0].ready(layers=layer)
        await shards.incs[0].layer(layer)
        assert shards.incs[0].carries == {"kv": (range(LAYERS), range(1))}
        assert not joined.layer_landed(layer), "half of its heads is here"
        shards.outs[1].ready(layers=layer)
        await joined.layer(layer)
        assert joined.layer_landed(layer)
        for head in (0, 1):
            found = w.target.tensors[layer][BLOCKS][..., head, :]
            assert (found == 10.0 * (head + 1) + layer).all()
    assert not joined.done()
    for out in shards.outs:
        out.finish()
    outcome = await joined
    assert outcome.complete
    assert joined.done()
    assert outcome.nbytes == w.target.tensors[0][BLOCKS].nbytes * LAYERS
    await joined.drained()
    assert joined.is_drained


@scenario("inproc")
async def test_what_one_producer_lacks_is_missing(w: World) -> None:
    shards = Shards(w)
    joined = kvwire.join(*shards.incs)
    shards.outs[0].ready()
    shards.outs[0].finish()
    shards.outs[1].ready(blocks=0)
    shards.outs[1].abort("this rank has failed")
    outcome = await joined
    assert not outcome.complete
    assert "this rank has failed" in outcome.missing["kv", BLOCKS[1]]
    assert outcome.usable_prefix <= 1


@scenario("inproc")
async def test_a_gate_does_not_wait_for_the_others_once_one_has_failed(
    w: World,
) -> None:
    """The first one never marks anything, and the second one is gone."""
    shards = Shards(w)
    joined = kvwire.join(*shards.incs)
    gate = asyncio.create_task(joined.layer(0))
    await w.until(lambda: all(inside.planned(inc) for inc in shards.incs))
    shards.outs[1].abort("gone")
    with pytest.raises(kvwire.RequestError, match="gone"):
        await gate
    assert not shards.incs[0].done()
    joined.abort("so nothing of it is needed")
    assert not (await joined).landed
    await joined.drained()


@scenario("inproc")
async def test_a_gate_that_nobody_waits_for_any_more(w: World) -> None:
    shards = Shards(w)
    joined = kvwire.join(*shards.incs)
    gate = asyncio.create_task(joined.layer(0))
    await asyncio.sleep(0)
    gate.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gate
    for out in shards.outs:
        out.ready()
        out.finish()
    assert (await joined).complete


@scenario("inproc")
async def test_what_cannot_be_joined(w: World) -> None:
    with pytest.raises(kvwire.UsageError, match="pass the Incoming of each"):
        kvwire.join()
    first = w.d.expect("a", w.target.cache, BLOCKS)
    other = w.d.expect("b", w.target.cache, [10, 12, 11])
    with pytest.raises(kvwire.UsageError, match="block lists of 'a' and 'b' diff"):
        kvwire.join(first, other)
    groups = {"full": (w.target.cache.spec, w.target.tensors)}
    third = w.d.expect("c", kvwire.PagedCache.grouped(groups), BLOCKS)
    with pytest.raises(kvwire.UsageError, match="has the groups kv, 'c' has full"):
        kvwire.join(first, third)
    for inc in (first, other, third):
        inc.abort()
