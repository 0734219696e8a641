"""What a codec saves and costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvwire.cli.main import CALLED_WRONG, main
from packages.certify.tests.bench.__main__ import app


def test_what_is_saved_and_what_it_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    names = ("zstd-planes", "lz4-planes")
    arguments = ["--codec", ",".join(names), "--rounds", "1", "--json", str(out)]
    assert main(["codecs", *arguments], app) == 0
    found = json.loads(out.read_text())["codecs"]
    printed = capsys.readouterr().out
    for images in ("demo KV", "demo KV in large blocks", "normal numbers"):
        assert images in printed
        for one in (found[name][images] for name in names):
            assert 0.2 < one["ratio"] < 0.9
            assert one["encode_bytes_per_s"] < one["memcpy_bytes_per_s"]


def test_an_unknown_codec_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs", "--codec", "int8"], app) == CALLED_WRONG
    assert "codec='int8'" in capsys.readouterr().err
