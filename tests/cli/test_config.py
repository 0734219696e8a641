"""``kvwire config show``: every value, and where it came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvwire
from kvwire.cli.main import CALLED_WRONG, main
from kvwire.config import FIELDS


def test_every_value_is_shown_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kvwire.toml"
    path.write_text('chunk_bytes = "2MiB"\n')
    monkeypatch.setenv("KVWIRE_PREFER", "local,tcp")
    assert main(["config", "show", "--config", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == FIELDS
    assert shown["chunk_bytes"] == {"value": 2**21, "from": f"config file {path}"}
    assert shown["prefer"]["from"] == "environment variable KVWIRE_PREFER"
    assert shown["lanes"] == {"value": 1, "from": "default"}
    assert main(["config", "show"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["lanes", "1", "default"] in rows


def test_a_password_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVWIRE_DIRECTORY", "redis://:secret@host:1")
    assert main(["config", "show"]) == 0
    shown = capsys.readouterr().out
    assert "redis://...@host:1" in shown
    assert "secret" not in shown


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("KVWIRE_FORBID", "locl", "did you mean 'local'?"),
        ("KVWIRE_BACKENDS", "local.tracr=one", "did you mean 'tracer'?"),
        ("KVWIRE_LANE", "4", "did you mean 'lanes'?"),
    ],
)
def test_what_would_be_refused_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    text: str,
    said: str,
) -> None:
    monkeypatch.setenv(variable, text)
    assert main(["config", "show"]) == CALLED_WRONG
    assert said in capsys.readouterr().err


# --- ``kvwire keygen``: what it prints; the file itself is of tests/security ----------


def test_what_it_prints_is_what_the_config_needs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last lines are pasted as they are, and the path works from any folder."""
    monkeypatch.chdir(tmp_path)
    key = "k" * 150  # a long path is not wrapped
    assert main(["keygen", key]) == 0
    said, errors = capsys.readouterr()
    assert (tmp_path / key).read_text().strip() not in said + errors
    assert "mode 0600" in said
    lines = said.splitlines()
    (tmp_path / "kvwire.toml").write_text("\n".join(lines[-2:]))
    config = kvwire.Config.load(tmp_path / "kvwire.toml", environment={})
    assert config.trust == "psk"
    assert config.psk_file == str(tmp_path / key)
