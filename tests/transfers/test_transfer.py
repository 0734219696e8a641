"""What both ends have in common: one outcome, leases, memory, quarantine."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

import kvwire
from kvwire.kv.plan import Segment
from kvwire.transfers.incoming import Incoming
from kvwire.transfers.outgoing import Outgoing
from tests.scenarios.world import DEST, LIST, World, scenario
from tests.support import inside, virtual_time
from tests.support.caches import LAYERS


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
    assert "cannot read /tmp/?" in (await out).missing["kv", LIST[0]]
    assert "/tmp/\udcff" in (await inc).missing["kv", DEST[0]]


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
