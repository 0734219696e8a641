"""Rates of forged contenders as tables and as a document."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvwire.backend import Availability, Capabilities, registry
from kvwire.cli.bench.case import Benchmark
from kvwire.cli.bench.document import document
from kvwire.cli.bench.fragment_work import work_of
from kvwire.cli.bench.fragments import (
    SAME_HOST,
    FragmentsChoice,
    fragments,
    why_not,
)
from kvwire.cli.bench.fragments_report import render
from kvwire.limits import KIB, MIB
from kvwire_inproc import InprocBackend
from tests.cli.bench.contenders import Scripted
from tests.cli.bench.forged import case, forged, measured, plan


def lines(benchmark: Benchmark) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=80).print(render(benchmark, measured(benchmark)))
    return [line.rstrip() for line in output.getvalue().splitlines()]


def row(shown: list[str], first: str) -> list[str]:
    found = next(line for line in shown if line.startswith(first))
    return found.replace("│", " ").split()


def test_each_table_ends_with_the_ratio_to_the_best() -> None:
    shown = lines(plan())
    start = shown.index(next(line for line in shown if "over best other" in line))
    assert row(shown[start:], "kvwire tcp") == ["kvwire", "tcp", "6.00x", "2.00x"]
    assert "push over TCP, a tensor for each layer: GB/s, CPU s/GiB" in shown


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
    (absent,) = found["missing"]
    assert (absent["name"], absent["remedy"]) == ("gloo", "pip install torch")


def test_who_failed_everywhere_has_no_row() -> None:
    """Only the line below says so: a row of failures tells nothing more."""
    shown = lines(plan(failing="iperf3"))
    assert not [line for line in shown if line.startswith("iperf3  ")]
    assert any(line.startswith("iperf3 failed, 4 KiB") for line in shown)


def test_six_sizes_fit_80_columns_and_more_begin_a_new_table() -> None:
    """With the longest of our names, and numbers of four characters."""
    names = ["kvwire local arena", "mooncake by 1024"]
    for count, tables in ((6, 1), (8, 2)):
        works = [
            work_of("push", 4 * KIB << number, cross_layer=False, round_bytes=MIB)
            for number in range(count)
        ]
        contenders = [Scripted(name, [[123.4e9]]) for name in names]
        rows = [case(SAME_HOST, work, contenders) for work in works]
        shown = lines(forged(*rows))
        assert max(map(len, shown)) <= 80
        assert "…" not in "".join(shown)
        assert sum(line.startswith("what") for line in shown) == tables
        assert "512 KiB" in "".join(shown) or count == 6


def test_a_backend_that_cannot_run_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It did not fail: nobody tried."""
    found = Availability(available=False, reason="no GPU", remedy="buy one")
    monkeypatch.setattr(registry, "availability", lambda _: found)
    choice = FragmentsChoice(
        transports=["nccl"],
        layer_bytes=[4 * KIB],
        round_bytes=MIB,
        loop="asyncio",
    )
    benchmark = fragments(choice)
    assert [c.name for c in benchmark.contenders] == ["memcpy"]
    (line,) = map(str, benchmark.missing)
    assert line == "kvwire nccl cannot run here and was left out: no GPU; buy one"


@pytest.mark.parametrize(
    ("capabilities", "said"),
    [
        (Capabilities(lanes=True), ""),
        (Capabilities(lanes=False), "no lanes"),
        (Capabilities(lanes=True, memory_kinds=frozenset()), "no host memory"),
    ],
)
def test_a_backend_that_this_benchmark_cannot_use_says_why(
    capabilities: Capabilities, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InprocBackend, "capabilities", capabilities)
    reason = why_not("inproc")
    assert said in reason
    assert bool(said) == bool(reason)
