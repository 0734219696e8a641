"""A short run; ``make store-torture`` kills two hundred times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.torture.world import torture


@pytest.mark.slow
@pytest.mark.asyncio(loop_factories=["asyncio"])  # processes are what is tested
async def test_no_promise_is_broken_by_kills(tmp_path: Path) -> None:
    assert "12 kills," in await torture(1, tmp_path, 12)
