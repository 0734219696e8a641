"""The tables: 80 columns with the largest numbers there may be, and who failed."""

from __future__ import annotations

import io

from rich.console import Console

from kvwire.cli.bench.case import (
    GIGABYTES_PER_SECOND,
    MICROSECONDS,
    Benchmark,
    Case,
    Contender,
)
from kvwire.cli.bench.store_report import render
from kvwire.cli.bench.store_work import FIRST_PUT, MATCH, ONE, PUT, SHAPES, work_of
from kvwire.cli.bench.turns import take_turns
from kvwire.limits import MIB
from tests.cli.bench.contenders import Scripted


def case(verb: str, ours: Contender, *beside: Contender) -> Case:
    time = verb in (ONE, MATCH)
    return Case(
        name=verb,
        work=work_of("server over local", verb, SHAPES["large"], 64 * MIB),
        unit=MICROSECONDS if time else GIGABYTES_PER_SECOND,
        ours=ours,
        beside=beside,
        target=None,
        tail=time,
    )


def shown(*cases: Case) -> list[str]:
    whole = Benchmark(name="store", cases=cases, notes=["A note."])
    findings = take_turns(whole, 1, lambda _: None)
    output = io.StringIO()
    Console(file=output, width=80).print(render(whole, findings))
    return [line.rstrip() for line in output.getvalue().splitlines()]


def row(lines: list[str], first: str) -> list[str]:
    return next(line for line in lines if line.strip().startswith(first)).split()


def test_a_rate_has_its_cpu_and_a_ratio_to_everybody() -> None:
    ours = Scripted("kvwire", [[3e9]])
    lines = shown(case(PUT, ours, Scripted("a", [[6e9]]), Scripted("b", [[0.2e9]])))
    # 0.5 s for 64 MiB are 8 s for a GiB.
    assert row(lines, "put") == [
        *("put,", "GB/s", "3.00", "8.00", "6.00", "0.50x", "0.20", "15x"),
    ]
    assert "A note." in lines


def test_a_time_has_its_tail() -> None:
    times = [2e-4] * 98 + [7e-4, 8e-4]
    lines = shown(case(MATCH, Scripted("kvwire", [times]), Scripted("a", [[1e-4]])))
    assert row(lines, "match") == ["match,", "us", "200", "700", "100", "2.00x"]
    assert "1,000 hashes" in lines


def test_rows_of_one_size_stand_below_it() -> None:
    ours = Scripted("kvwire")
    lines = shown(case(PUT, ours), case(FIRST_PUT, ours), case(MATCH, ours))
    names = [line.split("  ")[0] for line in lines if "a block" in line]
    assert names == ["1 MiB a block"]


def test_who_failed_is_named_with_the_reason() -> None:
    other = Scripted("a", failing="round")
    lines = shown(case(PUT, Scripted("kvwire"), other, Scripted("b")))
    assert "failed" in row(lines, "put")
    assert "a failed, put: a failed to round" in lines


def test_it_fits_80_columns_with_long_names_and_large_numbers() -> None:
    ours = Scripted("kvwire server local", [[123.4e9]])
    slow = Scripted("kvwire server local", [[0.1]])
    peers = [
        Scripted("transfer local", [[110.3e9]]),
        Scripted("sockets", [[0.5e9]]),
        Scripted("redis", [[0.1e9]]),
    ]
    quick = [
        Scripted("transfer local", [[1e-2]]),
        Scripted("sockets", [[1e-5]]),
        Scripted("redis", [[1e-4]]),
    ]
    lines = shown(case(PUT, ours, *peers), case(ONE, slow, *quick))
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= 80
    assert row(lines, "get of one")[-1] == "1000x"
    lines = shown(case(FIRST_PUT, ours, *peers[:2]))
    assert row(lines, "put")[:5] == ["put,", "new", "memory,", "GB/s", "123.40"]
    assert max(map(len, lines)) <= 80
