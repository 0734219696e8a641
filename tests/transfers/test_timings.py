"""Where the time of a transfer went: the phases fill it, and none is negative."""

from __future__ import annotations

import itertools

import pytest

from kvwire.kv.outcome import Timings
from kvwire.transfers import timings as module
from kvwire.transfers.timings import Phase, PhaseTimer


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is one second later."""
    ticks = itertools.count(100)
    monkeypatch.setattr(module, "monotonic", lambda: float(next(ticks)))


def total(times: Timings) -> float:
    return sum(float(getattr(times, name)) for name in times.__slots__)


ORDER: list[Phase] = ["met", "agreed", "first", "last", "over"]


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("memory", [False, True])
def test_every_phase(memory: bool) -> None:
    phases = PhaseTimer()
    for phase in ORDER:
        phases.mark_first(phase)
    times = phases.timings(memory=memory)
    assert (times.queue_s, times.memory_wait_s) == ((0, 1) if memory else (1, 0))
    assert (times.handshake_s, times.wire_s, times.commit_s) == (1, 1, 1)
    assert total(times) == 4, "between agreeing and the first byte nothing is owed"


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("reached", range(len(ORDER)))
def test_a_transfer_that_ended_early(reached: int) -> None:
    """Phases that never came take no time, and none of it is negative."""
    phases = PhaseTimer()
    for phase in ORDER[:reached]:
        phases.mark_first(phase)
    times = phases.timings(memory=False)
    assert all(getattr(times, name) >= 0 for name in times.__slots__)
    assert 0 < total(times) <= reached + 1
    assert phases.timings(memory=False) == times, "what is over stays as it was"


@pytest.mark.usefixtures("clock")
def test_an_earlier_link_stands_and_the_last_byte_moves() -> None:
    phases = PhaseTimer(created=90.0)
    phases.mark_first("met")
    phases.mark_first("met")
    phases.mark_first("agreed")
    phases.mark_first("first")
    phases.mark_last("last")
    phases.mark_last("last")
    times = phases.timings(memory=False)
    assert times.queue_s == 10
    assert times.wire_s == 2
