"""The pictures of the page on observing can be drawn again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe.pictures import draw


@pytest.mark.slow
@pytest.mark.asyncio(loop_factories=["asyncio"])  # it starts a process
async def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    await draw(tmp_path)
    top, trace = ((tmp_path / f"{name}.svg").read_text() for name in ("top", "trace"))
    for word in ("req-104", "published", "memory:64MiB"):
        assert word in top
    assert "http://" not in top.replace("http://www.w3.org", "")
    assert "@font-face" not in top
    assert len(trace) > len(top)
