"""Every scenario runs over the reference backend in virtual time, and over TCP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.scenarios.world import Scenario, play

Play = Callable[..., None]


@pytest.fixture(name="play", params=["inproc", "tcp"])
def _play(request: pytest.FixtureRequest) -> Play:
    """Runs a scenario on the transport of this test."""

    def run(scenario: Scenario, **config: Any) -> None:
        play(scenario, request.param, **config)

    return run
