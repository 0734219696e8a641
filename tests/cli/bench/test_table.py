"""The table: 80 columns, units, verdicts, and who was missing."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from kvwire.cli.bench.case import MICROSECONDS, Benchmark, Missing
from kvwire.cli.bench.table import render
from kvwire.cli.bench.turns import take_turns
from tests.cli.bench.contenders import Scripted, benchmark, case


def shown(whole: Benchmark) -> list[str]:
    findings = take_turns(whole, 1, lambda _: None)
    output = io.StringIO()
    Console(file=output, width=80).print(render(whole, findings))
    return [line.rstrip() for line in output.getvalue().splitlines()]


def row(lines: list[str], first: str, which: int = 0) -> list[str]:
    return [line for line in lines if line.startswith(first)][which].split()


def test_a_rate_that_is_good_enough() -> None:
    lines = shown(
        benchmark(
            case(Scripted("kvwire", [[4.5e9]]), Scripted("iperf3", [[5.0e9]])),
        )
    )
    assert row(lines, "1 KiB send, GB/s") == [
        *("1", "KiB", "send,", "GB/s", "4.50", "5.00", "iperf3"),
        *("0.90", ">=", "0.9", "met"),
    ]


def test_a_time_that_is_not_and_its_tail() -> None:
    times = [2e-6] * 98 + [7e-6, 8e-6]
    lines = shown(
        benchmark(
            case(
                Scripted("kvwire", [times]),
                Scripted("streams", [[1e-6]]),
                unit=MICROSECONDS,
                target=1.3,
                tail=True,
            )
        )
    )
    assert row(lines, "1 KiB send, us") == [
        *("1", "KiB", "send,", "us", "2.0", "7.0", "1.0", "streams"),
        *("2.00", "<=", "1.3", "missed"),
    ]


def test_everybody_is_in_the_second_table_with_what_it_cost() -> None:
    lines = shown(
        benchmark(
            case(Scripted("kvwire", [[1e9]]), Scripted("a", [[2e9]]), Scripted("b")),
        )
    )
    head = row(lines, "what", which=1)
    assert head == ["what", "kvwire", "a", "b"]
    # 0.5 s for 4 KiB are 131,072 s for a GiB.
    cells = row(lines, "1 KiB send", which=1)[4:]
    assert cells == [
        *("1.00", "131072"),
        *("2.00", "131072"),
        *("0.00", "131072"),
    ]


def test_a_contender_of_one_case_has_an_empty_cell_in_the_other() -> None:
    ours = Scripted("kvwire")
    whole = benchmark(case(ours, Scripted("a")), replace(case(ours), name="alone"))
    lines = shown(whole)
    assert row(lines, "alone", which=0)[-2:] == [">=", "0.9"]
    assert "nobody took part" in " ".join(lines)
    assert len(row(lines, "alone", which=1)) == len(["alone,", "GB/s", "0.00", "1.0"])


def test_it_fits_80_columns_with_long_names_and_large_numbers() -> None:
    ours = Scripted("kvwire", [[1000e-6]])
    streams = Scripted("uvloop streams", [[230e-6]])
    sockets = Scripted("bare sockets", [[12.3e9]])
    round_trip = case(ours, streams, unit=MICROSECONDS, target=1.3, tail=True)
    bulk = case(Scripted("kvwire", [[12.4e9]]), sockets)
    whole = benchmark(
        replace(round_trip, name="64 B round trip"), replace(bulk, name="16 MiB send")
    )
    lines = shown(whole)
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= 80


def test_notes_and_whoever_is_missing_are_named() -> None:
    whole = Benchmark(
        name="x",
        cases=[case(Scripted("kvwire"))],
        missing=[Missing("iperf3", "apt-get install iperf3")],
        notes=["One operation in flight."],
    )
    lines = shown(whole)
    assert "One operation in flight." in lines
    assert "iperf3 is not installed and was left out: apt-get install iperf3" in lines


def test_whoever_failed_is_named_with_the_reason() -> None:
    ours, other = Scripted("kvwire"), Scripted("iperf3", failing="round")
    lines = shown(benchmark(case(ours, other)))
    assert "iperf3 failed, 1 KiB send: iperf3 failed to round" in lines
    assert "nobody took part" in " ".join(lines)
