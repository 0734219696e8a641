"""The table and the document; numbers worked out by hand."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import kvwire
from kvwire_certify.bench import turns
from kvwire_certify.bench.command import Common, measure
from kvwire_certify.bench.report import load_note, render, show
from packages.certify.tests.bench.contenders import (
    Scripted,
    benchmark,
    case,
    measured,
    rated,
)

SOME = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=200)


@given(SOME)
def test_samples_are_summed_up_as_numpy_does(values: list[float]) -> None:
    # A fifth and three tenths of a second for 4 KiB.
    found = turns.Samples(4096, [values], [[0.2, 0.3]]).document()
    middle = np.median(values)
    assert found["median"] == pytest.approx(middle)
    assert found["p99"] == np.percentile(values, 99, method="inverted_cdf")
    assert found["mad"] == pytest.approx(np.median(np.abs(np.array(values) - middle)))
    assert (found["low"], found["high"]) == (min(values), max(values))
    assert found["count"] == len(values)
    assert found["rounds"] == [values]
    assert found["cpu_s_per_gib"] == 0.5 * 2**30 / 4096
    assert found["sides_cpu_s"] == [0.2, 0.3]


def test_a_rate_is_compared_with_the_highest() -> None:
    contenders = rated("ours", 8.0, 8.0, 10.0), rated("slow", 5.0), rated("fast", 10.0)
    row = case(*contenders, unit=turns.GIGABYTES_PER_SECOND)
    (finding,) = measured(row, rounds=2)
    found = turns.compare(finding)
    assert (found.best, found.ratio) == ("fast", 0.9)
    assert (found.low, found.high) == (0.8, 1.0)


def test_a_time_is_compared_with_the_lowest_of_others() -> None:
    """What is ours as well is nobody to be compared with."""
    ours, also = Scripted("kvwire tcp", [[3.0]]), Scripted("kvwire local", [[1.0]])
    slow, fast = Scripted("slow", [[9.0]]), Scripted("fast", [[2.0]])
    (finding,) = measured(case(ours, also, slow, fast, ours=2))
    found = turns.compare(finding)
    assert (found.best, found.ratio) == ("fast", 1.5)
    (alone,) = measured(case(ours, also, ours=2))
    assert turns.compare(alone).ratio is None


# --- the table ------------------------------------------------------------------------


def shown(whole: turns.Benchmark, width: int = 80) -> list[str]:
    findings = turns.take_turns(whole, 1, lambda _: None)
    output = io.StringIO()
    Console(file=output, width=width).print(render(whole, findings))
    return [line.rstrip() for line in output.getvalue().splitlines()]


def test_a_rate_has_its_cpu_a_time_its_tail_or_cpu_and_all_a_ratio() -> None:
    rates = rated("kvwire", 4.5e9), rated("iperf3", 5.0e9)
    tail = [2e-6] * 98 + [7e-6, 8e-6]
    times = Scripted("kvwire", [tail]), Scripted("streams", [[1e-6]])
    alone = Scripted("kvwire", [[2e-3, 2e-3]])
    lines = shown(
        benchmark(
            case(*rates, group="x", unit=turns.GIGABYTES_PER_SECOND),
            case(*times, group="y", tail=True),
            case(alone, group="z", placement="on CPUs 0 and 1"),
        )
    )
    cells = [line.split() for line in lines]
    assert ["what", "kvwire", "iperf3", "ratio"] in cells
    # 0.5 s for 4 KiB are 131,072 s for a GiB.
    rate = ["4.50", "131072", "5.00", "131072", "0.90"]
    assert ["1", "KiB", "send,", "GB/s", *rate] in cells
    time = ["2.00", "7.00", "1.00", "1.00", "2.00"]
    assert ["1", "KiB", "send,", "us", *time] in cells
    # Each operation took 2 ms, and half of 0.2 s and of 0.3 s of its sides' CPU.
    assert ["1", "KiB", "send,", "us", "2000", "100000+150000"] in cells
    titles = [line for line in lines if line.startswith("kvwire bench")]
    assert titles == [
        "kvwire bench scripted x",
        "kvwire bench scripted y",
        "kvwire bench scripted z, on CPUs 0 and 1",
    ]


def test_it_fits_80_columns_with_long_names_and_large_numbers() -> None:
    names = [
        "kvwire server local",
        "transfer local",
        "sockets",
        "redis",
        "mooncake by 8",
    ]
    rates = [rated(name, 123.4e9) for name in names]
    times = [Scripted(name, [[0.1]]) for name in names]
    long = "4 KiB push, cross-layer"
    lines = shown(
        benchmark(
            case(*rates, name=long, unit=turns.GIGABYTES_PER_SECOND),
            case(*times, name=long, tail=True),
        )
    )
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= 80
    assert sum(name in line for line in lines for name in names) >= len(names)


def test_a_narrow_screen_has_more_tables_and_whole_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    names = ["kvwire tcp", "uvloop streams", "bare sockets"]
    rates = [rated(name, 123.4e9) for name in names]
    lines = shown(benchmark(case(*rates, unit=turns.GIGABYTES_PER_SECOND)), 60)
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= 60
    assert all(any(name in line for line in lines) for name in names)


# --- the document, and where it goes --------------------------------------------------


def test_a_run_shows_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    ours = Scripted("kvwire", [[0.0], [0.0], [1.0, 3.0], [2.0]])
    peers = Scripted("other", [[4.0]]), Scripted("broken", failing="round")
    whole = benchmark(
        case(ours, *peers),
        case(ours, peers[1]),
        missing=[turns.Missing("iperf3", "install it")],
        notes=["a note"],
    )
    out = tmp_path / "found.json"
    measure(whole, Common(json=out, loop="asyncio", rounds=2), transport="tcp")

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "kvwire bench scripted, both on CPU 5"
    assert lines[-3:] == [
        "a note",
        "broken failed, 1 KiB send and 1 more: broken failed to round",
        "iperf3 is not installed and was left out: install it",
    ]
    found = json.loads(out.read_text())
    machine = found.pop("machine")
    assert len(machine["load"]) == 3
    only, _ = found.pop("cases")
    load, *notes = found.pop("notes")
    assert load.startswith("Load when it began: ")
    assert notes == ["a note"]
    assert found == {
        "benchmark": "scripted",
        "kvwire": kvwire.__version__,
        "settings": {
            "loop": "asyncio",
            "rounds": 2,
            "placement": "both",
            "listen": "",
            "peer": "",
            "transport": "tcp",
        },
        "contenders": {
            name: {"version": f"{name} 1"} for name in ("kvwire", "other", "broken")
        },
        "missing": [
            {"name": "iperf3", "remedy": "install it", "reason": "is not installed"}
        ],
    }
    assert only.pop("contenders")["kvwire"]["rounds"] == [[1.0, 3.0], [2.0]]
    assert only.pop("work")["verb"] == "send"
    assert only == {
        "name": "1 KiB send",
        "group": "",
        "placement": "both on CPU 5",
        "cpus": [5, 5],
        "unit": "s",
        "best": "other",
        "ratio": 0.5,
        "low": 0.5,
        "high": 0.5,
        "failures": {"broken": "broken failed to round"},
    }


def test_a_document_goes_to_a_file_or_alone_to_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show("a table", lambda: {"met": True}, json=Path("-"))
    captured = capsys.readouterr()
    assert (json.loads(captured.out), captured.err) == ({"met": True}, "a table\n")
    missing = tmp_path / "no" / "found.json"
    with pytest.raises(kvwire.UsageError, match=f"{missing}: No such file"):
        show("a table", dict, json=missing)


def test_a_table_says_whether_the_machine_was_quiet() -> None:
    assert load_note(0.01).endswith("so quiet.")
    assert "others' work is in these figures" in load_note(1000)
