"""``kvwire bench codecs``, with two texts."""

from __future__ import annotations

import pytest

from kvwire.cli.bench import codecs
from kvwire.cli.bench.codecs import SETS, measured
from kvwire.cli.main import CALLED_WRONG, main
from tests.cli.bench.conftest import Bench

# Starts processes, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(120)


def test_everything_is_measured_and_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "measured", lambda name: measured(name, 1))
    monkeypatch.setattr(codecs, "SAID", 4)
    asked = "--codec", "zstd-planes,int4", "--rounds", "1"
    found, printed = bench("codecs", *asked)
    assert "int4 decode, GB/s" in printed
    assert [row["name"] for row in found["cases"]] == [
        f"{name} {verb}"
        for _ in SETS
        for name in ("zstd-planes", "int4")
        for verb in ("encode", "decode")
    ]
    for row in found["cases"]:
        assert set(row["contenders"]) == {"kvwire", "memcpy"}
        assert row["ratio"] > 0
    plain, exact, coarse = (found["codecs"][n] for n in ("", "zstd-planes", "int4"))
    assert exact["error"] == plain["error"] < 0.01 < coarse["error"] < 0.2
    assert exact["perplexity"] == plain["perplexity"]
    assert exact["differing"] == 0
    for ratios in (exact["ratios"], coarse["ratios"]):
        assert set(ratios) == set(SETS)
        assert all(0.2 < ratio < 0.9 for ratio in ratios.values())


def test_a_codec_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codecs", "--codec", "int3"]) == CALLED_WRONG
    assert "codec='int3'" in capsys.readouterr().err
