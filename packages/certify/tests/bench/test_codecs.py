"""What a codec with loss costs, and one without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvwire.cli.main import CALLED_WRONG, main
from packages.certify.tests.bench.__main__ import app


def test_what_is_lost_and_what_it_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    names = ("zstd-planes", "int4")
    arguments = ["--codec", ",".join(names), "--rounds", "1", "--json", str(out)]
    assert main(["codecs", *arguments], app) == 0
    found = json.loads(out.read_text())["codecs"]
    printed = capsys.readouterr().out
    for images in ("demo KV", "demo KV in large blocks", "normal numbers"):
        assert images in printed
        exact, coarse = (found[name][images] for name in names)
        assert exact["error"] == 0 < coarse["error"] < 0.2
        for one in (exact, coarse):
            assert 0.2 < one["ratio"] < 0.9
            assert one["encode_bytes_per_s"] < one["memcpy_bytes_per_s"]


def test_an_unknown_codec_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs", "--codec", "int3"], app) == CALLED_WRONG
    assert "codec='int3'" in capsys.readouterr().err
