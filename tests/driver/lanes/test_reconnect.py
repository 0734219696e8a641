"""When a lane that broke is tried again: pauses, and what ends the trying.

In virtual time. That data moves over what came back is in test_setup.py.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

from kvwire import BackendUnavailable
from kvwire.driver.lanes.reconnect import RERAISE_S, RERAISE_S_MAX, LaneReconnector
from tests.support.virtual_time import pass_time

pytestmark = pytest.mark.asyncio(loop_factories=["virtual"])


class Lanes:
    """Lanes that are missing, and attempts that do what the test says.

    Attributes:
        outcomes: What the next attempts raise; None, and after the last, they succeed.
        ended: How often nothing was being opened any more.
    """

    def __init__(self, *outcomes: Exception | None) -> None:
        self.missing = 0
        self.outcomes = list(outcomes)
        self.tried_at: list[float] = []
        self.ended = 0
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self.reconnector = LaneReconnector(self.lacks, self.attempt, self.end)

    def lose(self) -> None:
        self.missing += 1
        self.reconnector.lost()

    def lacks(self) -> bool:
        return self.missing > 0

    async def attempt(self) -> None:
        self.tried_at.append(self._loop.time() - self._began)
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome
        self.missing -= 1

    def end(self) -> None:
        self.ended += 1

    @property
    def pauses(self) -> list[float]:
        """Between one attempt and the next."""
        times = self.tried_at
        return [late - early for early, late in itertools.pairwise(times)]


@pytest.fixture(autouse=True)
def _longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pause is the longest that it may be."""
    monkeypatch.setattr("random.uniform", lambda low, high: high)


DOWN = BackendUnavailable("it is down")


async def test_it_is_tried_until_it_is_there() -> None:
    lanes = Lanes(*[DOWN] * 8)
    lanes.lose()
    await pass_time(1000)
    assert lanes.tried_at[0] == RERAISE_S
    assert lanes.pauses == [2, 4, 8, 16, 32, 60, 60, 60]
    assert not lanes.missing
    assert not lanes.reconnector.busy
    assert lanes.ended == 1


async def test_several_that_break_come_back_one_after_the_other() -> None:
    lanes = Lanes(None, DOWN)
    for _ in range(3):
        lanes.lose()
    await pass_time(100)
    assert lanes.tried_at == [1, 3, 7, 15]
    assert not lanes.missing


@pytest.mark.parametrize(("lives_s", "pause_s"), [(1.0, 2.0), (RERAISE_S_MAX, 1.0)])
async def test_what_breaks_as_soon_as_it_is_up_is_opened_less_and_less_often(
    lives_s: float, pause_s: float
) -> None:
    """And what was up for a while, as if nothing had ever been wrong with it."""
    lanes = Lanes()
    lanes.lose()
    await pass_time(RERAISE_S + lives_s)
    assert len(lanes.tried_at) == 1
    lanes.lose()
    await pass_time(100)
    assert lanes.pauses == [lives_s + pause_s]


async def test_what_is_not_missing_is_not_opened() -> None:
    """Nor what is not worth a try any more when its pause is over."""
    lanes = Lanes()
    lanes.reconnector.lost()
    assert not lanes.reconnector.busy
    lanes.lose()
    lanes.missing = 0
    await pass_time(100)
    assert not lanes.tried_at
    assert not lanes.reconnector.busy
