"""What a busy machine takes too long for: to load UCX, and to bring up a lane of it."""

from __future__ import annotations

import pytest

from kvwire.driver.lanes import setup
from kvwire_nixl.library import NixlAgent, installed
from kvwire_nixl.settings import parse
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="session", autouse=True)
def nixl_is_loaded() -> None:
    if installed():
        NixlAgent(parse({}), "first").close()


@pytest.fixture(autouse=True)
def lanes_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one has not come up the others carry the data, and the test is of it."""
    monkeypatch.setattr(setup, "LANE_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(setup, "LANE_TIMEOUT_LAST_S", PATIENCE_S)
