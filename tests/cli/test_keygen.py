"""``kvwire keygen``: a private file, never overwritten, a key that is never shown."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import kvwire
from kvwire.cli.main import CALLED_WRONG, main
from kvwire.security.keys import read_key_file


def test_the_file_is_private_and_holds_a_key(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert main(["keygen", str(tmp_path / "key")]) == 0
    finally:
        os.umask(before)
    mode = stat.S_IMODE((tmp_path / "key").stat().st_mode)
    assert mode == 0o600
    assert len(read_key_file(str(tmp_path / "key"))) == 32


def test_what_it_prints_is_what_the_config_needs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last lines are pasted as they are, and the path works from any folder."""
    monkeypatch.chdir(tmp_path)
    key = "k" * 150  # a long path is not wrapped
    main(["keygen", key])
    said, errors = capsys.readouterr()
    assert (tmp_path / key).read_text().strip() not in said + errors
    assert "mode 0600" in said
    lines = said.splitlines()
    (tmp_path / "kvwire.toml").write_text("\n".join(lines[-2:]))
    config = kvwire.Config.load(tmp_path / "kvwire.toml", environment={})
    assert config.trust == "psk"
    assert config.psk_file == str(tmp_path / key)


@pytest.mark.parametrize(
    ("name", "said"),
    [("key", "never overwritten"), ("no/key", "No such file or directory")],
)
def test_what_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    file = tmp_path / "key"
    file.write_text("mine")
    assert main(["keygen", str(tmp_path / name)]) == CALLED_WRONG
    assert file.read_text() == "mine"
    assert said in capsys.readouterr().err
