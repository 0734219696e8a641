"""What a busy machine takes too long for: to load UCX."""

from __future__ import annotations

import pytest

from kvwire_nixl.library import NixlAgent, installed
from kvwire_nixl.settings import parse


@pytest.fixture(scope="session", autouse=True)
def nixl_is_loaded(request: pytest.FixtureRequest) -> None:
    if installed() and any("nixl" in item.nodeid for item in request.session.items):
        NixlAgent(parse({}), "first").close()
