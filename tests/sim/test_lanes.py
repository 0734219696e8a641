"""Lanes in the simulator: what its schedules reach."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.sim.run import run_seed


@pytest.mark.slow
def test_the_schedules_reach_what_lanes_are_for() -> None:
    """They come up, carry, break before, within and after a payload, or never come.

    And where they break again and again, others come up beyond the number that there
    may be at once.
    """
    said: Counter[str] = Counter()
    for seed in range(400):
        for _, _, what, *details in run_seed(seed).trace:
            if what == "lane":
                said[str(details[0])] += 1
    for event in ("up", "payload", "it broke", "the other half is gone", "declined"):
        assert said[event] > 50, f"{event}: {said[event]}"
    assert said["payload missed"] > 10
    assert said["payload of a later lane"] > 10, "none is raised after many have gone"
    assert said["the other process is gone"]
    assert said["the connection is over"]
