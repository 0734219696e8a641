"""R41, R42: event loops that close, or have had nothing to do for hours."""

from __future__ import annotations

import threading

import pytest

import kvwire
from tests.support import inside, virtual_time
from tests.support.world import DEST, LIST, World, play, scenario


@scenario()
async def test_r40_a_call_that_fails_leaves_nothing(w: World) -> None:
    w.pull_side.abort()
    await w.push_side.wait_closed()
    for _ in range(3):
        for verb, memory in (
            (w.pull_side.pull, w.target),
            (w.push_side.push, w.source),
        ):
            end = verb("t", memory.cache, LIST, deadline=0.01)
            assert not (await end).complete
            await end.drained()
    w.p.publish("t", w.source.cache, LIST).abort()
    for side in (w.p, w.d):
        assert not inside.registry(side).live
        assert not len(inside.buffers(side))
    w.pull_side = await w.d.connect(w.address)
    assert await w.moves("t", LIST, DEST)


def test_r41_the_loop_ends_while_transfers_run(transport: str) -> None:
    kept: list[kvwire.Outgoing] = []
    ended: list[kvwire.Outcome] = []

    async def run(w: World) -> None:
        out, inc = w.begin()
        waits = w.p.publish("nobody comes", w.source.cache, [0])
        expects = w.d.expect("nobody sends", w.target.cache, [0])
        out.ready(layers=0)
        await inc.layer(0)
        kept.append(out)
        # Closed in the middle of it all: everything ends, and everything is free.
        await w.p.close()
        for end in (out, inc, waits):
            ended.append(await end)
            await end.drained()
        await w.d.close()
        ended.append(await expects)
        await expects.drained()

    play(run, transport)
    assert [outcome.complete for outcome in ended] == [False] * 4
    assert all(all(outcome.missing.values()) for outcome in ended)
    # Another loop runs now, or none. A forward pass that still runs need not know.
    kept[0].ready(layers=1)
    thread = threading.Thread(target=kept[0].ready, kwargs={"layers": 2})
    thread.start()
    thread.join()
    kept[0].abort("late")


@scenario("inproc", ping_interval_s=30.0)
async def test_r42_a_request_after_idle_hours(
    w: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over inproc only: hours pass in virtual time alone."""
    hours = 3 * 3600.0
    monkeypatch.setattr(virtual_time, "LONGEST_S", 2 * hours)
    await virtual_time.pass_time(hours)
    assert not w.pull_side.closed, "pings have kept it"
    assert await w.moves("t", LIST, DEST)
    assert len(w.d.live_connections) == 1
