"""R30 to R32: part of it is lost, and who learns that by which name."""

from __future__ import annotations

import asyncio
import threading

import numpy as np

import kvwire
from kvwire.endpoint.io_thread import called
from tests.support.caches import SPEC, Memory, same
from tests.support.world import World, scenario


def test_r30_a_failure_wakes_a_thread_that_waits() -> None:
    with (
        kvwire.Engine(name="prefill") as p,
        kvwire.Engine(name="decode", lease_s=0.2, resume=False) as d,
    ):
        target = Memory()
        connection = d.connect(p.listen("127.0.0.1:0"))
        accepted = p.run(p.communicator.accept(), timeout_s=5)
        inc = d.pull(connection, "t", target.cache, [1])
        found: list[kvwire.Outcome] = []
        thread = threading.Thread(target=lambda: found.append(inc.wait()))
        thread.start()
        p.run(called(accepted.abort))
        thread.join(30)
        assert [outcome.complete for outcome in found] == [False]


@scenario()
async def test_r31_block_ids_of_two_groups_are_told_apart(w: World) -> None:
    full, window = (Memory(), Memory()), (Memory(), Memory())
    for group in (full, window):
        group[0].stamp(range(32), salt=1 + (group is window))
    source, target = (
        kvwire.PagedCache.grouped(
            {"full": (SPEC, full[side].tensors), "window": (SPEC, window[side].tensors)}
        )
        for side in (0, 1)
    )
    # The same ids in both groups, and other memory.
    out = w.p.publish("t", source, {"full": [1, 2], "window": [1, 2]})
    inc = w.pull_side.pull("t", target, {"full": [7, 8], "window": [7, 8]})
    out.ready(group="full")
    out.ready(group="window", blocks=1)
    out.finish(partial=True)
    outcome = await inc
    assert set(outcome.missing) == {("window", 7)}
    assert set(outcome.landed) == {("full", 7), ("full", 8), ("window", 8)}
    assert set((await out).missing) == {("window", 1)}
    assert same(full[0], [1, 2], full[1], [7, 8])
    assert same(window[0], [2], window[1], [8])
    assert window[1].free([7])


class SkewedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock is a day ahead of everybody else's."""

    def time(self) -> float:
        return super().time() + 86_400.0


def test_r32_clocks_that_differ_by_a_day(transport: str) -> None:
    """Instants never travel; leases and deadlines are durations of either side."""
    source, target = Memory(), Memory()
    source.stamp(range(32))
    address: list[kvwire.Address] = []
    listening, over = threading.Event(), threading.Event()
    produced: list[kvwire.Outcome] = []

    async def produce() -> None:
        async with kvwire.open(name="prefill", lease_s=5.0) as p:
            where = "127.0.0.1:0" if transport == "tcp" else "inproc://"
            address.append(await p.listen(where))
            out = p.publish("t", source.cache, [1, 2], deadline=5.0)
            listening.set()
            out.ready()
            out.finish()
            produced.append(await out)
            await asyncio.to_thread(over.wait, 5)

    async def consume() -> kvwire.Outcome:
        async with kvwire.open(name="decode", lease_s=5.0) as d:
            connection = await d.connect(address[0])
            return await connection.pull("t", target.cache, [10, 11], deadline=5.0)

    thread = threading.Thread(target=asyncio.run, args=(produce(),))
    thread.start()
    try:
        assert listening.wait(30)
        with asyncio.Runner(loop_factory=SkewedLoop) as runner:
            outcome = runner.run(consume())
    finally:
        over.set()
        thread.join(10)
    assert outcome.complete
    assert [o.complete for o in produced] == [True]
    assert same(source, [1, 2], target, [10, 11])
    times = outcome.timings
    phases = (times.queue_s, times.handshake_s, times.wire_s, times.commit_s)
    assert np.all(np.array(phases) >= 0)
    assert sum(phases) < 5
