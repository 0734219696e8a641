"""Where the time of a transfer went: it adds up, and what was waited for is blamed."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire.transfers import timings as module
from kvwire.transfers.timings import Phase, PhaseTimer
from tests.support import inside, virtual_time
from tests.support.caches import LAYERS, Memory
from tests.support.world import World, play, scenario

LIST, DEST = [1, 2, 3], [11, 12, 13]
# What the loop adds: the last word may wait for a frame to ride on.
SLACK_S = 0.03
PHASES: list[Phase] = [
    "queue",
    "memory_wait",
    "handshake",
    "mark_wait",
    "wire",
    "commit",
    "lost",
]
seconds = st.integers(0, 20).map(lambda tenths: tenths / 10)


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's own clock, which is virtual."""

    def now() -> float:
        return asyncio.get_running_loop().time()

    monkeypatch.setattr(module, "monotonic", now)


@given(st.lists(st.tuples(st.sampled_from(PHASES), seconds, seconds), max_size=20))
def test_phases_add_up_whatever_follows_what(
    steps: list[tuple[Phase, float, float]],
) -> None:
    now = [100.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "monotonic", lambda: now[0])
        phases = PhaseTimer()
        for phase, spent_s, ago_s in steps:
            now[0] += spent_s
            phases.enter(phase, ago_s)
        now[0] += 1
        times = phases.timings()
        assert times.total_s == pytest.approx(now[0] - 100)
        assert phases.age_s == now[0] - 100
        assert all(getattr(times, f"{phase}_s") >= 0 for phase in PHASES)
        assert phases.timings() == times


@pytest.mark.usefixtures("clock")
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    push=st.booleans(),
    before_s=seconds,
    gaps_s=st.lists(seconds, min_size=LAYERS, max_size=LAYERS),
    after_s=seconds,
    cut_before=st.integers(0, LAYERS),
)
def test_each_end_blames_what_it_waited_for(
    push: bool, before_s: float, gaps_s: list[float], after_s: float, cut_before: int
) -> None:
    """Waiting for the peer, for its compute, and for its last word."""

    async def run(w: World) -> None:
        begun = asyncio.get_running_loop().time()
        if push:
            out = w.push_side.push("t", w.source.cache, LIST)
            await virtual_time.pass_time(before_s)
            inc = w.d.expect("t", w.target.cache, DEST)
        else:
            inc = w.pull_side.pull("t", w.target.cache, DEST)
            await virtual_time.pass_time(before_s)
            out = w.p.publish("t", w.source.cache, LIST)
        for layer, gap_s in enumerate(gaps_s):
            await virtual_time.pass_time(gap_s)
            out.ready(layers=layer)
            await inc.layer(layer)
            if layer == cut_before and not push:
                w.cut()
                await w.until(lambda: w.pull_side.closed)
        await virtual_time.pass_time(after_s)
        out.finish()
        received, sent = (await inc).timings, (await out).timings
        spent_s = asyncio.get_running_loop().time() - begun
        late, early = (received, sent) if push else (sent, received)
        assert early.total_s == pytest.approx(spent_s, abs=SLACK_S)
        assert late.total_s == pytest.approx(spent_s - before_s, abs=SLACK_S)
        waited = early.memory_wait_s if push else early.queue_s
        assert waited == pytest.approx(before_s, abs=SLACK_S)
        cut = not push and cut_before < LAYERS
        if not cut:
            compute_s = sum(gaps_s)
            assert received.mark_wait_s == pytest.approx(compute_s, abs=SLACK_S)
            assert received.commit_s == pytest.approx(after_s, abs=SLACK_S)
            expected = pytest.approx(compute_s + after_s, abs=SLACK_S)
            assert sent.mark_wait_s == expected
        assert received.wire_s <= SLACK_S
        assert sent.wire_s <= SLACK_S
        assert received.lost_s <= (5.0 if cut else 0.0)

    play(run, "inproc")


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("marked", [1, LAYERS])
@scenario("inproc")
async def test_a_dead_peer_is_neither_compute_nor_commit(w: World, marked: int) -> None:
    deadline = timedelta(seconds=8)
    out, inc = w.begin(theirs={"deadline": deadline})
    out.ready(layers=slice(0, marked))
    await inc.layer(marked - 1)
    thaw = w.freeze(w.pull_side)
    times = (await inc).timings
    # Silent for three pings; then there is another link, and it waits for the rest.
    assert times.lost_s == pytest.approx(6, abs=0.5)
    rest_s = times.mark_wait_s if marked < LAYERS else times.commit_s
    assert rest_s == pytest.approx(2, abs=0.5)
    assert times.total_s == pytest.approx(8, abs=SLACK_S)
    thaw()
    out.abort()


@pytest.mark.usefixtures("clock")
@scenario("inproc")
async def test_silence_counts_before_the_peer_is_taken_for_dead(w: World) -> None:
    deadline = timedelta(seconds=5)
    out, inc = w.begin(theirs={"deadline": deadline})
    out.ready()
    await inc.layer(LAYERS - 1)
    thaw = w.freeze(w.pull_side)
    times = (await inc).timings
    assert times.lost_s == pytest.approx(5, abs=0.5)
    thaw()
    out.abort()


@pytest.mark.usefixtures("clock")
@scenario("inproc")
async def test_a_consumer_that_was_served_has_nothing_on_the_wire(w: World) -> None:
    """What its producer waits for after that is the last word of another one."""
    other = await w.d.connect(w.address)
    out = w.p.publish("t", w.source.cache, LIST, consumers=2)
    served = w.pull_side.pull("t", w.target.cache, DEST)
    await w.until(lambda: inside.planned(served))
    late = other.pull("t", Memory().cache, DEST)
    await w.until(lambda: inside.planned(late))
    thaw = w.freeze(other)
    out.ready()
    out.finish()
    assert (await served).complete
    assert await w.stays_open(out, 1)
    times = [leg.phases.timings() for leg in inside.legs(out)]
    thaw()
    assert (await out).complete
    assert times[0].wire_s < SLACK_S
    assert times[0].commit_s == pytest.approx(1, abs=2 * SLACK_S)
    assert times[1].wire_s == pytest.approx(1, abs=2 * SLACK_S)
