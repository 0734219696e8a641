"""What ``python -m tests.bench control`` measures, and what it says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvwire.cli.main import main
from tests.bench import control
from tests.bench.__main__ import app

pytestmark = pytest.mark.timeout(180)


@pytest.mark.usefixtures("threads")
def test_more_layers_have_their_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "COUNT", 2)
    out = tmp_path / "found.json"
    assert main(["control", "--rounds", "1", "--json", str(out)], app) == 0
    assert "31 more layers add " in capsys.readouterr().out
    found = json.loads(out.read_text())
    names = ["1 tiny layer", "32 of them", "32, each sent by itself"]
    assert [row["name"] for row in found["cases"]] == names
    assert len(found["cpu_s"]) == 3
    assert min(found["cpu_s"]) > 0
