"""The command: what it prints, and its exit status."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvwire.cli.doctor.command import UNWELL
from kvwire.cli.main import CALLED_WRONG, main


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a test sets is configured."""
    for name in os.environ:
        if name.startswith("KVWIRE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("kvwire ")
    assert any(line.split()[:2] == ["ok", "tcp"] for line in lines)


def test_json_of_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--pid", str(os.getppid()), "--json"]) == 0
    found = document(capsys)
    assert found["pid"] == os.getppid()
    assert {"system", "settings", "transports", "findings", "asked"} <= set(found)
    assert {"kvwire", "Python", "uvloop", "numpy"} <= set(found["versions"])
    assert "tcp" in {transport["name"] for transport in found["transports"]}


def test_what_is_required_and_missing_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvwire.toml"
    file.write_text('require = ["carrier-pigeon"]')
    assert main(["doctor", "--config", str(file)]) == UNWELL
    assert "carrier-pigeon" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pid", "-1"],
        ["--config", "no-such-file.toml"],
    ],
)
def test_called_wrong(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == CALLED_WRONG
    assert capsys.readouterr().err
