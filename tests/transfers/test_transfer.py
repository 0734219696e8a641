"""What both ends have in common: one outcome, leases, memory, quarantine."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest

import kvwire
from kvwire.kv.plan import Segment
from kvwire.transfers.incoming import Incoming
from kvwire.transfers.outgoing import Outgoing
from tests.support import inside, virtual_time
from tests.support.caches import LAYERS, RANKS
from tests.support.world import DEST, LIST, World, scenario


@scenario("inproc", lease_s=4.0)
async def test_a_lease_runs_while_the_peer_is_missing(w: World) -> None:
    began = inside.now()
    ends = {
        "offered": w.p.publish("a", w.source.cache, [1], lease_s=1.0),
        "expected": w.d.expect("b", w.target.cache, [1], lease_s=2.0),
        "configured": w.p.publish("c", w.source.cache, [2]),
    }
    for end, seconds in zip(ends.values(), (1.0, 2.0, 4.0), strict=True):
        outcome = await end
        assert inside.now() - began == pytest.approx(seconds, abs=0.01)
        (reason,) = set(outcome.missing.values())
        began_as = f"the lease of {seconds:g} s ended while a peer was missing: "
        assert reason.startswith(began_as)
        assert reason.endswith(("consumers have pulled it", "peer has pushed it"))
        await end.drained()


@scenario("inproc")
async def test_a_lease_is_renewed_by_a_consumer_that_comes(w: World) -> None:
    out = w.p.publish("t", w.source.cache, LIST, consumers=2, lease_s=2.0)
    await virtual_time.pass_time(1.5)
    first = w.pull_side.pull("t", w.target.cache, DEST)
    await virtual_time.pass_time(1.5)
    assert not out.done()
    second = w.pull_side.pull("t", w.target.cache, [20, 21, 22, 23, 24])
    await virtual_time.pass_time(10.0)
    assert not out.done(), "nobody is missing"
    out.ready()
    out.finish()
    assert (await first).complete
    assert (await second).complete
    assert (await out).complete


@scenario("inproc", lease_s=1.0)
async def test_a_peer_that_asks_holds_no_lease(w: World) -> None:
    """Its question waits for as long as its link and its deadline let it."""
    inc = w.pull_side.pull("t", w.target.cache, DEST)
    await virtual_time.pass_time(100.0)
    assert not inc.done()
    out = w.p.publish("t", w.source.cache, LIST)
    out.ready()
    out.finish()
    assert (await inc).complete


@pytest.mark.parametrize("verb", ["pull", "push"])
@scenario("inproc")
async def test_closing_a_connection_ends_what_waits_on_it(w: World, verb: str) -> None:
    """At once and on both sides: a closed connection is not lost."""
    asked: kvwire.Incoming | kvwire.Outgoing
    if verb == "pull":
        asked = w.pull_side.pull("t", w.target.cache, DEST)
        ends = [w.pull_side, w.push_side]
    else:
        asked = w.push_side.push("t", w.source.cache, LIST)
        ends = [w.push_side, w.pull_side]
    began = inside.now()
    await ends[1].close()
    outcome = await asked
    assert not outcome.landed
    assert inside.now() - began < 0.1
    await asked.drained()
    assert ends[0].closed


@scenario("inproc")
async def test_drained_waits_for_the_outcome(w: World) -> None:
    out, inc = w.begin()
    waits = asyncio.create_task(inc.drained())
    out.ready(layers=slice(0, LAYERS))
    await inc.layer(LAYERS - 1)
    assert not waits.done()
    assert not inc.is_drained
    out.finish()
    await waits
    assert inc.done()


@scenario()
async def test_a_communicator_drains_before_it_closes(w: World) -> None:
    """It waits for open transfers, and those that begin meanwhile."""
    out, inc = w.begin()
    drain = asyncio.create_task(w.p.drain())
    later = w.p.publish("later", w.source.cache, [5])
    out.ready()
    out.finish()
    assert (await inc).complete
    await out.drained()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.shield(drain)
    later.abort("not wanted")
    await drain
    assert not w.p.open_transfers
    assert not w.p.quarantined_bytes


@scenario("inproc")
async def test_a_block_ends_with_its_transfer(w: World) -> None:
    """What is over stays as it is; what is not is aborted. Then the memory is free."""
    freed: list[str] = []
    out = w.p.publish("t", w.source.cache, LIST, free=lambda: freed.append("out"))
    free = partial(freed.append, "in")
    async with w.pull_side.pull("t", w.target.cache, DEST, free=free) as inc:
        out.ready()
        out.finish()
        assert (await inc).complete
    assert inc.is_drained
    assert (await out).complete
    await out.drained()
    assert sorted(freed) == ["in", "out"]
    async with w.p.expect("u", w.source.cache, LIST, free=free) as left:
        pass
    assert left.is_drained
    assert set((await left).missing.values()) == {"its block has ended"}
    assert freed[2:] == ["in"]


@scenario("inproc")
async def test_memory_is_freed_whatever_cancels_its_user(w: World) -> None:
    """Also by a scope that cancels at each await; never before it has drained."""
    freed: list[bool] = []
    inside_block = asyncio.Event()

    async def use() -> None:
        async with w.pull_side.pull(
            "t", w.target.cache, DEST, free=lambda: freed.append(inc.is_drained)
        ) as inc:
            out.ready(layers=slice(0, 1))
            await inc.layer(0)
            inside_block.set()
            await inc

    out = w.p.publish("t", w.source.cache, LIST)
    task = asyncio.create_task(use())
    await inside_block.wait()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    await virtual_time.pass_time(10.0)
    assert freed == [True]
    assert out.done()


@scenario("inproc")
async def test_what_cannot_free_is_refused(w: World) -> None:
    wrong: Any = "pool"
    with pytest.raises(kvwire.UsageError, match=r"free: .*callable"):
        w.p.publish("t", w.source.cache, LIST, free=wrong)
    freed: list[int] = []
    with pytest.raises(kvwire.UsageError, match="out of range"):
        w.p.publish("t", w.source.cache, [10**6], free=lambda: freed.append(1))
    await virtual_time.pass_time(1.0)
    assert not freed


@scenario("inproc")
async def test_half_a_character_does_not_keep_a_reason_from_its_peer(w: World) -> None:
    """Python reads one of each byte of a file's name that is no UTF-8."""
    out, inc = w.begin()
    await w.until(lambda: inside.legs(out))
    inc.abort("cannot read /tmp/\udcff")
    for outcome in (await out, await inc):
        (reason,) = outcome.missing.reasons
        assert "cannot read /tmp/" in reason
        assert "udcff" in reason
        assert reason.isprintable()


@pytest.mark.parametrize("end", ["settled", "abort", "cut", "deadline"])
@pytest.mark.parametrize("side", [Incoming, Outgoing])
@scenario(resume=False)
async def test_without_memory_for_an_outcome_it_comes_when_there_is_some(
    w: World,
    side: type[Incoming | Outgoing],
    end: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for ever, and nothing is free before it has drained."""
    real, refusals = side._record, [MemoryError(), MemoryError()]

    def short(self: Any) -> None:
        if refusals:
            raise refusals.pop()
        real(self)

    monkeypatch.setattr(side, "_record", short)
    within = 0.2 if end == "deadline" else None
    out, inc = w.begin({"deadline": within})
    await w.until(lambda: inside.planned(inc) and inside.legs(out)[0].planned)
    out.ready(layers=slice(0, LAYERS - (end != "settled")))
    if end == "settled":
        out.finish()
    elif end == "abort":
        inc.abort()
    elif end == "cut":
        w.cut()
    outcomes = [await inc, await out]
    assert not refusals
    assert all(outcome.complete == (end == "settled") for outcome in outcomes)
    await inc.drained()
    await out.drained()


@scenario("inproc")
async def test_without_memory_to_note_what_has_landed_a_transfer_ends(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last word of a consumer ends it even so; what was not noted is missing."""
    out, inc = w.begin()
    await w.until(lambda: inside.planned(inc) and inside.legs(out)[0].planned)

    def short(segment: Segment) -> None:
        raise MemoryError

    monkeypatch.setattr(inside.legs(out)[0].landed, "mark", short)
    out.ready()
    out.finish()
    assert (await inc).complete
    async with asyncio.timeout(60):
        assert not (await out).complete
    await out.drained()


# --- what users see of a transfer, and the shards of several producers as one ---------


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
