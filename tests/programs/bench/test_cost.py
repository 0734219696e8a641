"""``python -m tests.programs.bench cost``."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from kvwire.cli.main import main
from tests.programs.bench import cost
from tests.programs.bench.__main__ import app
from tests.programs.bench.cost import watched


@pytest.mark.slow
def test_everything_is_measured_and_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cost, "MEASURES", dict.fromkeys(cost.MEASURES, 4))
    out = tmp_path / "found.json"
    arguments = ["--rounds", "1", "--round-mib", "1", "--json", str(out)]
    assert main(["cost", *arguments], app) == 0

    printed = capsys.readouterr().out
    assert "idle connection" in printed
    assert max(map(len, printed.splitlines())) <= 100
    found = json.loads(out.read_text())["transports"]["kvwire tcp"]
    assert found["failure"] == ""
    assert set(found["measures"]) == set(cost.MEASURES)
    for side in (0, 1):
        first = {name: rounds[0][side] for name, rounds in found["measures"].items()}
        assert first["open"]["bytes"] > 0
        assert first["peak"]["bytes"] > 0
        assert first["cpu"]["cpu_s"] > 0
        assert first["stalls"]["callbacks"] > 0
        assert 0 < first["stalls"]["cpu_p999_s"] <= first["stalls"]["cpu_max_s"]


@pytest.mark.usefixtures("threads")
def test_a_transport_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--transport", "pigeons", "--rounds", "1", "--round-mib", "1"]
    assert main(["cost", *arguments], app) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "kvwire pigeons failed: " in printed


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_every_callback_is_timed_until_the_end() -> None:
    """uvloop runs its handles in C, where nobody can stand in."""
    with watched() as answer:
        asyncio.get_running_loop().call_soon(_spin)
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # the callback that ended it has been timed as well
    counted = answer()["callbacks"]
    await asyncio.sleep(0)
    found = answer()
    assert found["callbacks"] == counted == 2
    assert found["cpu_max_s"] >= 0.002
    assert found["wall_p999_s"] == found["wall_max_s"]


def _spin() -> None:
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        pass
