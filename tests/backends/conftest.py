"""The first agent of a process loads UCX, for which a busy machine takes too long."""

from __future__ import annotations

import pytest

from kvwire_nixl.library import NixlAgent, installed
from kvwire_nixl.settings import parse


@pytest.fixture(scope="session", autouse=True)
def nixl_is_loaded() -> None:
    if installed():
        NixlAgent(parse({}), "first").close()
