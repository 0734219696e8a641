"""When a lane that broke is opened again: the pauses between the attempts.

In virtual time. That data moves over what came back is in test_setup.py.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Final

import pytest

from kvwire.driver.lanes.setup import RERAISE_S, RERAISE_S_MAX
from kvwire.limits import LANE_TIMEOUT_SHARE
from tests.support import inside
from tests.support.lanes import HangingLane, use
from tests.support.pairs import Pair, connected
from tests.support.virtual_time import pass_time

pytestmark = pytest.mark.asyncio(loop_factories=["virtual"])

LANES: Final[dict[str, Any]] = {"prefer": ("inproc",), "lanes": 2}


def break_lane(pair: Pair) -> None:
    inside.lanes(pair.left).open[0].lane.abort()


async def test_a_lane_is_opened_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pause is between half of a limit and the limit, which doubles."""
    loop = asyncio.get_running_loop()
    async with connected("inproc", **LANES) as pair:
        counters = pair.near.counters
        attempt_s = LANE_TIMEOUT_SHARE * pair.near.config.handshake_timeout_s
        break_lane(pair)
        await pass_time(0.4 * RERAISE_S)
        use(monkeypatch, HangingLane, "client")
        assert counters.lanes_failed == 1, "the one that broke"
        failed_at: list[float] = []
        for count in range(2, 11):
            while counters.lanes_failed < count:
                await pass_time(0.05)
            failed_at.append(loop.time())
    limits = [2, 4, 8, 16, 32, RERAISE_S_MAX, RERAISE_S_MAX, RERAISE_S_MAX]
    for (early, late), limit in zip(itertools.pairwise(failed_at), limits, strict=True):
        assert limit / 2 - 0.1 < late - early - attempt_s < limit + 0.1


@pytest.mark.parametrize("stays", [False, True])
async def test_a_lane_that_breaks_as_soon_as_it_is_open(stays: bool) -> None:
    """One that stays open for a while is opened as if nothing had been wrong."""
    async with connected("inproc", **LANES) as pair:
        lanes = inside.lanes(pair.left)
        for limit_s in (RERAISE_S, 2 * RERAISE_S, 4 * RERAISE_S):
            break_lane(pair)
            await pass_time(limit_s + 0.1)
            assert len(lanes.open) == 1
        limit_s = 8 * RERAISE_S
        if stays:
            await pass_time(RERAISE_S_MAX + 1)
            limit_s = RERAISE_S
        break_lane(pair)
        await pass_time(limit_s / 2 - 0.1)
        assert not lanes.open
        await pass_time(limit_s / 2 + 0.2)
        assert len(lanes.open) == 1
