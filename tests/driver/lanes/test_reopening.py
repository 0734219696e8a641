"""When a lane that broke is opened again: the pauses between the attempts.

In virtual time. That data moves over what came back is in test_setup.py.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

from kvwire import BackendUnavailable
from kvwire.backend.lane import LaneHandler
from kvwire.driver.lanes.setup import RERAISE_S, RERAISE_S_MAX
from kvwire_inproc.lane import InprocLane
from tests.support import inside
from tests.support.lanes import use
from tests.support.pairs import Pair, connected
from tests.support.virtual_time import pass_time

pytestmark = pytest.mark.asyncio(loop_factories=["virtual"])

# No lane opens while this has errors.
_down: list[Exception] = []
_tried_at: list[float] = []


class _Tried(InprocLane):
    async def join(self, bootstrap: bytes, handler: LaneHandler) -> None:
        _tried_at.append(asyncio.get_running_loop().time())
        if _down:
            raise _down.pop()
        await super().join(bootstrap, handler)


@pytest.fixture(autouse=True)
def _longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause is the longest that it may be."""
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    use(monkeypatch, _Tried, "client")
    _tried_at.clear()


def break_lane(pair: Pair) -> float:
    inside.lanes(pair.left).open[0].lane.abort()
    return asyncio.get_running_loop().time()


async def test_a_lane_is_opened_less_and_less_often() -> None:
    async with connected("inproc", prefer=("inproc",), lanes=2) as pair:
        _tried_at.clear()
        _down[:] = [BackendUnavailable("it is down")] * 8
        _tried_at.append(break_lane(pair))
        await pass_time(1000)
        pauses = [round(b - a, 3) for a, b in itertools.pairwise(_tried_at)]
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
        broke_at = break_lane(pair)
        await pass_time(100)
        assert round(_tried_at[-1] - broke_at, 3) == pause_s
