"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvwire.cli.bench import pair
from kvwire.cli.main import main
from tests.cli.bench.thread_side import ThreadSide


@pytest.fixture(params=["threads", pytest.param("processes", marks=pytest.mark.slow)])
def sides(request: pytest.FixtureRequest) -> str:
    """Have the sides of a benchmark as threads, and once more as they are."""
    kind: str = request.param
    if kind == "threads":
        request.getfixturevalue("threads")
    return kind


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the sides of a benchmark as threads."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(pair, "SideProcess", ThreadSide)


# Arguments of the command to its document, and what it has printed.
Bench = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], sides: str) -> Bench:
    """Run ``kvwire bench`` with these arguments, whose table fits a wide screen."""

    def run(*arguments: str) -> tuple[dict[str, Any], str]:
        out = tmp_path / "found.json"
        assert main(["bench", *arguments, "--json", str(out)]) == 0
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 100
        return json.loads(out.read_text()), printed

    return run
