"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

import os

import pytest

from kvwire.cli.bench import overlap_pair, pair, solo, store_contender
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
    for module in (overlap_pair, pair, solo, store_contender):
        monkeypatch.setattr(module, "SideProcess", ThreadSide)
