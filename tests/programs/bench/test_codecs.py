"""``python -m tests.programs.bench codecs``, for a codec with loss and one without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvwire.cli.main import CALLED_WRONG, main
from tests.programs.bench import codecs
from tests.programs.bench.__main__ import app


@pytest.mark.usefixtures("threads")
def test_what_is_lost_and_what_it_costs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    names = ("zstd-planes", "int4")
    arguments = ["--codec", ",".join(names), "--rounds", "1", "--json", str(out)]
    assert main(["codecs", *arguments], app) == 0
    found = json.loads(out.read_text())
    for images in codecs.SETS:
        exact, coarse = (found["codecs"][name][images] for name in names)
        assert exact["error"] == 0 < coarse["error"] < 0.2
        assert all(0.2 < one["ratio"] < 0.9 for one in (exact, coarse))
    assert [row["name"] for row in found["cases"]] == [
        f"{name} {verb}"
        for _ in codecs.SETS
        for name in names
        for verb in ("encode", "decode")
    ]
    assert {row["group"].partition(", ")[2] for row in found["cases"]} == {
        "32 KiB",
        "1 MiB",
    }
    assert all(set(row["contenders"]) == {"kvwire", "memcpy"} for row in found["cases"])


def test_an_unknown_codec_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs", "--codec", "int3"], app) == CALLED_WRONG
    assert "codec='int3'" in capsys.readouterr().err
