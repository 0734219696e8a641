"""When a lane that broke is opened again: the pauses between the attempts.

In virtual time. That data moves over what came back is in test_setup.py.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

from kvwire import BackendUnavailable
from kvwire.driver.lanes.setup import RERAISE_S, RERAISE_S_MAX, LaneSetup
from tests.support import inside
from tests.support.pairs import Pair, connected
from tests.support.virtual_time import pass_time

pytestmark = pytest.mark.asyncio(loop_factories=["virtual"])


@pytest.fixture(autouse=True)
def _longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause is the longest that it may be."""
    monkeypatch.setattr("random.uniform", lambda low, high: high)


def break_lane(pair: Pair) -> float:
    inside.lanes(pair.left).open[0].lane.abort()
    return asyncio.get_running_loop().time()


async def test_a_lane_is_opened_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    down = [BackendUnavailable("it is down")] * 8
    tried_at: list[float] = []
    reopen = LaneSetup._reopen

    async def tried(setup: LaneSetup) -> None:
        tried_at.append(asyncio.get_running_loop().time())
        if down:
            raise down.pop()
        await reopen(setup)

    monkeypatch.setattr(LaneSetup, "_reopen", tried)
    async with connected("inproc", prefer=("inproc",), lanes=2) as pair:
        tried_at.append(break_lane(pair))
        await pass_time(1000)
        pauses = [round(b - a, 3) for a, b in itertools.pairwise(tried_at)]
        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
        assert pauses[0] == RERAISE_S
        assert pauses[-1] == RERAISE_S_MAX
        assert len(inside.lanes(pair.left).open) == 1
        assert not inside.driver(pair.left).lane_setup.busy


@pytest.mark.parametrize(("lives_s", "pause_s"), [(1.0, 2.0), (RERAISE_S_MAX + 1, 1.0)])
async def test_a_lane_that_breaks_as_soon_as_it_is_open(
    lives_s: float, pause_s: float
) -> None:
    """One that was open for a while is opened as if nothing had been wrong with it."""
    async with connected("inproc", prefer=("inproc",), lanes=2) as pair:
        break_lane(pair)
        await pass_time(RERAISE_S + lives_s)
        break_lane(pair)
        await pass_time(pause_s - 0.25)
        assert not inside.lanes(pair.left).open
        await pass_time(0.5)
        assert len(inside.lanes(pair.left).open) == 1
