"""The program that compares ways to use two engines, without engines."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from packages.vllm.tests.programs.bench import worth
from packages.vllm.tests.programs.bench.worth import WAYS, Cell, Round


def rounds(way: str, seconds: float) -> list[Round]:
    first, gaps = [0.1 * seconds, 0.2 * seconds], [0.01, 0.02, 0.5 * seconds]
    return [Round(way, "300:4x2", seconds, 8, first, gaps)] * 3


EVERY = [one for number, way in enumerate(WAYS) for one in rounds(way, number + 1.0)]


def test_a_cell_is_read_as_it_is_written() -> None:
    assert Cell.read("1500:64x6") == Cell(1500, 64, 6)
    assert str(Cell.read("1500:64x6")) == "1500:64x6"
    for text in worth.CELLS.split(","):
        assert str(Cell.read(text)) == text


def test_the_figures_of_a_cell() -> None:
    found = worth.of(EVERY, WAYS[1], "300:4x2")
    assert found == pytest.approx(
        {
            "tokens/s": 4.0,
            "first p50": 400.0,
            "first p90": 400.0,
            "gap p50": 20.0,
            "gap p99": 1000.0,
        }
    )


def test_runs_are_joined_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for number, one in enumerate(EVERY):
        files.append(tmp_path / f"{number}.json")
        found = {"about": {"kvwire": "1"}, "rounds": [asdict(one)]}
        files[-1].write_text(json.dumps(found))
    picture = tmp_path / "worth.svg"
    words = ["--plot", str(picture), "--json", str(tmp_path / "all.json")]
    assert worth.main([*words, "--join", *map(str, files)]) == 0
    shown = capsys.readouterr().out
    assert "| 300:4x2 | prefill + decode | 8 | 200 | 200 | 20 | 500 |" in shown
    assert len(json.loads((tmp_path / "all.json").read_text())["rounds"]) == len(EVERY)
    assert "<svg" in picture.read_text()
