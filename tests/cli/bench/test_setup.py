"""``kvwire bench setup``, with few connections."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvwire.cli.bench import setup
from kvwire.cli.bench.setup import COLUMNS
from kvwire.cli.main import main

# Starts processes, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(120)


@pytest.mark.usefixtures("sides")
def test_everything_is_measured_and_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup, "CONNECTIONS", 3)
    out = tmp_path / "found.json"
    assert main(["bench", "setup", "--rounds", "2", "--json", str(out)]) == 0

    assert "tcp first transfer, us" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [row["name"] for row in found["cases"]] == [
        f"tcp {column}" for column in COLUMNS
    ]
    for row in found["cases"]:
        assert set(row["contenders"]) == {"kvwire tcp", "uvloop streams"}
        assert [len(r) for r in row["contenders"]["kvwire tcp"]["rounds"]] == [3, 3]
        assert row["ratio"] > 0
        assert row["met"] is None
