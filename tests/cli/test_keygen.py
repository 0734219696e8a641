"""``kvwire keygen``: what it prints; the file itself is of tests/security."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvwire
from kvwire.cli.main import main


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
