"""What tests of gloo share."""

from __future__ import annotations

import importlib.util
from datetime import timedelta

import pytest


@pytest.fixture(scope="session")
def gloo_is_loaded() -> None:
    """What gloo makes once for the process is not what a test leaves behind."""
    if importlib.util.find_spec("torch") is None:
        return
    from torch import distributed

    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    distributed.ProcessGroupGloo(store, 0, 1, timedelta(seconds=5))
