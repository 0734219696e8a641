"""What the models' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from packages.store.tests.model.life import CLOCK


@pytest.fixture(autouse=True)
def own_time() -> Iterator[None]:
    """What time a model lets pass ends with its test; other disks use it too."""
    yield
    CLOCK.ahead_s = 0
