"""The transports of a scenario that is no coroutine of one loop."""

from __future__ import annotations

import pytest


@pytest.fixture(name="transport", params=["inproc", "tcp"])
def _transport(request: pytest.FixtureRequest) -> str:
    """The transport of this test."""
    name: str = request.param
    return name
