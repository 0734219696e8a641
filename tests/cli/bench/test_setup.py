"""``kvwire bench setup``, with few connections."""

from __future__ import annotations

import pytest

from kvwire.cli.bench import setup
from kvwire.cli.bench.setup import COLUMNS
from tests.cli.bench.conftest import Bench

# Starts processes, on a machine that may be busy with others.
pytestmark = pytest.mark.timeout(120)


def test_everything_is_measured_and_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "CONNECTIONS", 3)
    found, printed = bench("setup", "--rounds", "2")
    assert "tcp first transfer, us" in printed
    assert [row["name"] for row in found["cases"]] == [
        f"tcp {column}" for column in COLUMNS
    ]
    for row in found["cases"]:
        assert set(row["contenders"]) == {"kvwire tcp", "uvloop streams"}
        assert [len(r) for r in row["contenders"]["kvwire tcp"]["rounds"]] == [3, 3]
        assert row["ratio"] > 0
        assert row["met"] is None
