"""The picture: well-formed, one bar for each contender, lengths in proportion."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from kvwire.cli.bench.case import MICROSECONDS, Benchmark
from kvwire.cli.bench.plot import WIDTH, draw
from kvwire.cli.bench.turns import take_turns
from tests.cli.bench.contenders import Scripted, benchmark, case

SVG = "{http://www.w3.org/2000/svg}"


def drawn(whole: Benchmark) -> ET.Element:
    picture = draw(whole, take_turns(whole, 1, lambda _: None))
    return ET.fromstring(picture)


def bars(picture: ET.Element) -> list[float]:
    # The first one is the background.
    return [float(r.attrib["width"]) for r in picture.findall(f"{SVG}rect")[1:]]


def test_bars_are_as_long_as_the_medians() -> None:
    picture = drawn(
        benchmark(case(Scripted("kvwire", [[1.0, 2.0, 3.0]]), Scripted("b", [[4.0]])))
    )
    ours, theirs = bars(picture)
    assert theirs == pytest.approx(2 * ours, rel=1e-3)


def test_each_case_has_its_own_scale() -> None:
    small = case(Scripted("kvwire", [[1e-6]]), unit=MICROSECONDS)
    large = case(Scripted("kvwire", [[1e9]]))
    first, second = bars(drawn(benchmark(small, large)))
    assert first == second


def test_the_numbers_are_written_beside_the_bars() -> None:
    picture = drawn(benchmark(case(Scripted("kvwire", [[2.5e9]]))))
    texts = [text.text for text in picture.findall(f"{SVG}text")]
    assert "2.50 GB/s kvwire" in texts
    assert "1 KiB send" in texts


def test_a_long_name_moves_the_bars() -> None:
    row = case(Scripted("kvwire"))
    long = replace(row, name="server over local, 64 KiB, get of one")
    begins = [
        [
            float(r.attrib["x"])
            for r in drawn(benchmark(*rows)).findall(f"{SVG}rect")[1:]
        ]
        for rows in ([row], [row, long])
    ]
    assert begins[0] == [150.0]
    assert begins[1] == [(len(long.name) + 2) * 6.0] * 2


def test_everything_is_inside_and_escaped() -> None:
    whole = benchmark(case(Scripted("<kvwire> & co", [[1.0, 1000.0]]), Scripted("b")))
    picture = drawn(whole)
    assert float(picture.attrib["width"]) == WIDTH
    for rectangle in picture.findall(f"{SVG}rect"):
        end = float(rectangle.attrib.get("x", 0)) + float(rectangle.attrib["width"])
        assert end <= WIDTH
        bottom = float(rectangle.attrib.get("y", 0)) + float(rectangle.attrib["height"])
        assert bottom <= float(picture.attrib["height"])
