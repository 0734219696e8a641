"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

import os

import pytest

from kvwire.cli.bench import pair
from tests.cli.bench.contenders import ThreadSide


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
