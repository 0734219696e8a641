"""Rates of forged contenders: ratios, targets, layouts, failures, the picture."""

from __future__ import annotations

import io
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from kvwire.cli.bench.case import Missing
from kvwire.cli.bench.fragment_claims import Rates, judge
from kvwire.cli.bench.fragment_work import work_of
from kvwire.cli.bench.fragments import TCP, VERBS, Fragments, Row
from kvwire.cli.bench.fragments_plot import draw
from kvwire.cli.bench.fragments_report import Findings, document, render
from kvwire.cli.bench.turns import take_turns
from kvwire.limits import KIB, MIB
from tests.cli.bench.contenders import Scripted

SVG = "{http://www.w3.org/2000/svg}"
# GB/s by size, and across layers.
RATES = {
    "kvwire tcp": {4 * KIB: 3.0, 1 * MIB: 4.0},
    "nixl tcp": {4 * KIB: 0.5, 1 * MIB: 2.0},
    "ucx_perftest tcp": {4 * KIB: 50.0, 1 * MIB: 90.0},
}
ACROSS = {"kvwire tcp": 3.6, "nixl tcp": 2.5}


def plan(failing: str = "") -> Fragments:
    rows = [
        Row(TCP, work_of(verb, size, cross_layer=False, round_bytes=MIB), contenders)
        for verb in VERBS
        for size in (4 * KIB, 1 * MIB)
        if (
            contenders := [
                Scripted(n, [[r[size] * 1e9]], failing="round" if n == failing else "")
                for n, r in RATES.items()
            ]
        )
    ]
    rows += [
        Row(
            TCP,
            work_of(verb, 4 * KIB, cross_layer=True, round_bytes=MIB),
            [Scripted(name, [[rate * 1e9]]) for name, rate in ACROSS.items()],
        )
        for verb in VERBS
    ]
    return Fragments(rows, ["kvwire tcp"], [Missing("gloo", "pip install torch")])


def measured(benchmark: Fragments) -> Findings:
    return take_turns(benchmark, 2, lambda _: None)


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


def test_targets_are_judged_by_medians() -> None:
    verdicts = {
        (v.claim.target, v.best): v for v in judge(Rates(measured(plan())), ["push"])
    }
    assert verdicts[5.0, "nixl tcp"].ratio == pytest.approx(6.0)
    assert verdicts[5.0, "nixl tcp"].met
    assert verdicts[1.0, "nixl tcp"].ratio == pytest.approx(2.0)
    assert verdicts[0.6, "kvwire tcp"].ratio == pytest.approx(0.75)
    # Everybody's CPU is the same here.
    assert verdicts[5.0, "nixl tcp"].cpu_ratio == pytest.approx(1.0)
    assert len(verdicts) == 3


def test_a_target_that_is_missed() -> None:
    benchmark = plan()
    slow = [Scripted("kvwire tcp", [[1e9]]), Scripted("nixl tcp", [[1e9]])]
    work = work_of("push", 4 * KIB, cross_layer=False, round_bytes=MIB)
    slower = Fragments([Row(TCP, work, slow)], benchmark.ours)
    (verdict,) = judge(Rates(measured(slower)), VERBS)
    assert verdict.ratio == 1.0
    assert not verdict.met


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


def test_the_picture_has_a_point_for_each_rate_and_stays_inside() -> None:
    benchmark = plan()
    picture = ET.fromstring(draw(benchmark, measured(benchmark)))
    points = picture.findall(f".//{SVG}circle")
    assert len(points) == 2 * (2 * len(RATES) + len(ACROSS))
    assert [p.attrib["fill"] for p in points].count("white") == 2 * len(ACROSS)
    heights = [float(point.attrib["cy"]) for point in points]
    assert min(heights) >= 0
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert "push, TCP, GB/s" in texts
    assert set(RATES) <= set(texts)
