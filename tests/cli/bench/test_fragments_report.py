"""Rates of forged contenders as tables and as a document."""

from __future__ import annotations

import io

from rich.console import Console

from kvwire.cli.bench.fragments import Fragments
from kvwire.cli.bench.fragments_report import document, render
from tests.cli.bench.forged import measured, plan


def lines(benchmark: Fragments) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=100).print(render(benchmark, measured(benchmark)))
    return [line.rstrip() for line in output.getvalue().splitlines()]


def row(shown: list[str], first: str) -> list[str]:
    return next(line for line in shown if line.startswith(first)).split()


def test_each_table_ends_with_the_ratio_to_the_best_that_counts() -> None:
    """A buffer that stays in the cache is no peer, however fast it is."""
    shown = lines(plan())
    assert row(shown, "kvwire tcp / best other")[-2:] == ["6.00x", "2.00x"]
    assert "push over TCP, a tensor for each layer: GB/s, CPU s/GiB" in shown


def test_layouts_are_shown_side_by_side_for_each() -> None:
    shown = lines(plan())
    start = next(i for i, line in enumerate(shown) if "4 KiB a layer" in line)
    assert row(shown[start:], "kvwire tcp")[2:] == ["3.00", "3.60", "1.20", "1.00"] * 2
    assert row(shown[start:], "nixl tcp")[2:] == ["0.50", "2.50", "5.00", "1.00"] * 2


def test_who_failed_and_who_is_missing_is_said() -> None:
    shown = " ".join(" ".join(lines(plan(failing="nixl tcp"))).split())
    reason = "nixl tcp failed, 4 KiB push, per-layer, TCP and 3 more:"
    assert f"{reason} nixl tcp failed to round" in shown
    assert "gloo is not installed and was left out: pip install torch" in shown


def test_the_document_has_every_sample_and_every_failure() -> None:
    benchmark = plan(failing="nixl tcp")
    found = document(benchmark, measured(benchmark), {"rounds": 2})
    first = found["cases"][0]
    assert first["contenders"]["kvwire tcp"]["rounds"] == [[3e9], [3e9]]
    assert first["failures"] == {"nixl tcp": "nixl tcp failed to round"}
    assert first["work"]["count"] == 256
    assert found["missing"] == [{"name": "gloo", "remedy": "pip install torch"}]
