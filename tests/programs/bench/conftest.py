"""Fixtures of the tests of benchmarks."""

from __future__ import annotations

from tests.cli.bench.conftest import threads

__all__ = ["threads"]
