"""Every scenario runs over the reference backend in virtual time, and over TCP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.scenarios.world import Scenario, play

Play = Callable[..., None]


@pytest.fixture(name="transport", params=["inproc", "tcp"])
def _transport(request: pytest.FixtureRequest) -> str:
    """The transport of this test."""
    name: str = request.param
    return name


@pytest.fixture(name="play")
def _play(transport: str) -> Play:
    """Runs a scenario on the transport of this test."""

    def run(scenario: Scenario, **config: Any) -> None:
        play(scenario, transport, **config)

    return run
