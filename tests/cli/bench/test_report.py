"""The table, the document, numbers worked out by hand, and where all of it goes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import kvwire
from kvwire.cli.bench.pair import Sample
from kvwire.cli.bench.report import document, progress_bar, render, show
from kvwire.cli.bench.turns import (
    MICROSECONDS,
    Benchmark,
    Missing,
    Samples,
    compare,
    take_turns,
)
from tests.cli.bench.contenders import Scripted, benchmark, case, measured

SOME = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=200)


@given(SOME)
def test_a_summary_is_as_numpy_has_it(values: list[float]) -> None:
    found = Samples([Sample(values, 1, [0.0])]).summary()
    middle = np.median(values)
    assert found["median"] == pytest.approx(middle)
    assert found["p99"] == np.percentile(values, 99, method="inverted_cdf")
    assert found["mad"] == pytest.approx(np.median(np.abs(np.array(values) - middle)))
    assert (found["low"], found["high"]) == (min(values), max(values))
    assert found["count"] == len(values)


def test_cpu_seconds_are_for_a_gib() -> None:
    # A fifth and three tenths of a second for 4 KiB, as the contender says.
    samples = Samples([Sample([1.0], 4096, [0.2, 0.3])])
    assert samples.cpu_s_per_gib == 0.5 * 2**30 / 4096
    assert samples.sides_cpu_s_per_gib == [0.2 * 2**30 / 4096, 0.3 * 2**30 / 4096]


def test_a_rate_is_compared_with_the_highest() -> None:
    ours = Scripted("ours", [[8.0], [8.0], [10.0]])
    slow, fast = Scripted("slow", [[5.0]]), Scripted("fast", [[10.0]])
    (finding,) = measured(case(ours, slow, fast, target=0.9), rounds=2)
    found = compare(finding)
    assert (found.best, found.ratio, found.met) == ("fast", 0.9, True)
    assert (found.low, found.high) == (0.8, 1.0)


def test_a_time_is_compared_with_the_lowest_of_others() -> None:
    """What is ours as well is nobody to be compared with."""
    ours = Scripted("kvwire tcp", [[3.0]], ours=True)
    also = Scripted("kvwire local", [[1.0]], ours=True)
    slow, fast = Scripted("slow", [[9.0]]), Scripted("fast", [[2.0]])
    row = case(ours, also, slow, fast, unit=MICROSECONDS, target=1.3)
    (finding,) = measured(row)
    found = compare(finding)
    assert (found.best, found.ratio, found.met) == ("fast", 1.5, False)
    (alone,) = measured(case(ours, also))
    assert compare(alone).ratio is None


# --- the table ------------------------------------------------------------------------


def shown(whole: Benchmark) -> list[str]:
    findings = take_turns(whole, 1, lambda _: None)
    output = io.StringIO()
    Console(file=output, width=80).print(render(whole, findings))
    return [line.rstrip() for line in output.getvalue().splitlines()]


def cells(lines: list[str], first: str) -> list[str]:
    return next(line for line in lines if line.startswith(first))[len(first) :].split()


def test_a_rate_has_its_cpu_and_its_verdict() -> None:
    ours, other = Scripted("kvwire", [[4.5e9]]), Scripted("iperf3", [[5.0e9]])
    found = cells(shown(benchmark(case(ours, other))), "1 KiB send, GB/s")
    # 0.5 s for 4 KiB are 131,072 s for a GiB.
    assert found == ["4.50", "131072", "5.00", "131072", "0.90", ">=", "0.9", "met"]


def test_a_time_has_its_tail() -> None:
    times = [2e-6] * 98 + [7e-6, 8e-6]
    ours, other = Scripted("kvwire", [times]), Scripted("streams", [[1e-6]])
    row = case(ours, other, unit=MICROSECONDS, target=1.3, tail=True)
    found = cells(shown(benchmark(row)), "1 KiB send, us")
    assert found == ["2.00", "7.00", "1.00", "1.00", "2.00", "<=", "1.3", "missed"]


def test_groups_have_tables_and_a_column_for_everybody() -> None:
    a, b = Scripted("a", [[1e9]]), Scripted("b", [[2e9]])
    rows = [case(a, name="one", group="x", target=None)]
    rows += [case(b, name="two", group="y", target=None)]
    lines = shown(benchmark(*rows))
    heads = [line.split() for line in lines if line.startswith("what")]
    assert heads == [["what", "a"], ["what", "b"]]
    assert [line for line in lines if "kvwire bench" in line] == [
        "kvwire bench scripted x",
        "kvwire bench scripted y",
    ]


def test_it_fits_80_columns_with_long_names_and_large_numbers() -> None:
    names = [
        "kvwire server local",
        "transfer local",
        "sockets",
        "redis",
        "mooncake by 8",
    ]
    rates = [Scripted(name, [[123.4e9]]) for name in names]
    times = [Scripted(name, [[0.1]]) for name in names]
    long = "4 KiB push, cross-layer"
    lines = shown(
        benchmark(
            case(*rates, name=long),
            case(*times, name=long, unit=MICROSECONDS, tail=True),
        )
    )
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= 80
    assert sum(name in line for line in lines for name in names) >= len(names)


def test_who_failed_or_is_missing_is_named_with_the_reason() -> None:
    whole = Benchmark(
        name="x",
        cases=[case(Scripted("kvwire"), Scripted("a", failing="round"))] * 2,
        missing=[Missing("iperf3", "apt-get install iperf3")],
        notes=["One operation in flight."],
    )
    lines = shown(whole)
    assert "One operation in flight." in lines
    assert "a failed, 1 KiB send and 1 more: a failed to round" in lines
    assert "iperf3 is not installed and was left out: apt-get install iperf3" in lines


# --- the document, and where it goes --------------------------------------------------


def test_everything_is_in_the_document() -> None:
    ours = Scripted("kvwire", [[0.0], [1.0, 3.0], [2.0]])
    theirs = Scripted("other", [[4.0]])
    whole = Benchmark(
        name="x",
        cases=[case(ours, theirs, target=0.5)],
        missing=[Missing("iperf3", "install it")],
        notes=["a note"],
    )
    findings = take_turns(whole, 2, lambda _: None)
    found = json.loads(json.dumps(document(whole, findings, {"loop": "uvloop"})))

    assert (found["benchmark"], found["kvwire"]) == ("x", kvwire.__version__)
    assert found["settings"] == {"loop": "uvloop"}
    assert len(found["machine"]["load"]) == 3
    assert found["contenders"] == {
        "kvwire": {"version": "kvwire 1"},
        "other": {"version": "other 1"},
    }
    assert found["missing"] == [
        {"name": "iperf3", "remedy": "install it", "reason": "is not installed"}
    ]
    assert found["notes"] == ["a note"]
    (only,) = found["cases"]
    assert (only["unit"], only["target"]) == ("B/s", 0.5)
    assert (only["best"], only["ratio"], only["met"]) == ("other", 0.5, True)
    assert only["work"]["nbytes"] == 1024
    mine = only["contenders"]["kvwire"]
    assert mine["rounds"] == [[1.0, 3.0], [2.0]]
    assert (mine["count"], mine["median"], mine["mad"]) == (3, 2.0, 1.0)
    assert mine["cpu_s_per_gib"] == 131072.0


def test_a_document_goes_to_a_file_or_alone_to_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    show("a table", lambda: {"met": True}, json=file)
    assert json.loads(file.read_text()) == {"met": True}
    assert capsys.readouterr() == ("a table\n", "")
    show("a table", lambda: {"met": True}, json=Path("-"))
    captured = capsys.readouterr()
    assert (json.loads(captured.out), captured.err) == ({"met": True}, "a table\n")
    missing = tmp_path / "no" / "found.json"
    with pytest.raises(kvwire.UsageError, match=f"{missing}: No such file"):
        show("a table", dict, json=missing)


def test_the_bar_is_drawn_beside_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(2) as progress:
        progress("the first")
        progress("the second")
    assert capsys.readouterr().out == ""
