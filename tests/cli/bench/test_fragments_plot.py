"""The picture of forged rates: what is drawn, and where."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from kvwire.cli.bench.fragments import Fragments
from kvwire.cli.bench.fragments_plot import draw
from tests.cli.bench.forged import ACROSS, RATES, measured, of_one_size, plan

SVG = "{http://www.w3.org/2000/svg}"


def drawn(benchmark: Fragments) -> ET.Element:
    return ET.fromstring(draw(benchmark, measured(benchmark)))


def texts(picture: ET.Element) -> list[str | None]:
    return [text.text for text in picture.iter(f"{SVG}text")]


def test_the_picture_has_a_point_for_each_rate_and_stays_inside() -> None:
    picture = drawn(plan())
    points = picture.findall(f".//{SVG}circle")
    assert len(points) == 2 * (2 * len(RATES) + len(ACROSS))
    assert [p.attrib["fill"] for p in points].count("white") == 2 * len(ACROSS)
    heights = [float(point.attrib["cy"]) for point in points]
    assert min(heights) >= 0
    assert "push, TCP, GB/s" in texts(picture)
    assert set(RATES) <= set(texts(picture))


def test_twice_the_rate_is_the_same_step_up_wherever_it_is() -> None:
    names = {"kvwire tcp": 4.0, "a": 2.0, "b": 1.0}
    heights = [
        float(point.attrib["cy"])
        for point in drawn(of_one_size(names)).iter(f"{SVG}circle")
    ]
    ours, a, b = heights
    assert ours < a < b
    assert a - ours == pytest.approx(b - a, abs=0.2)


def test_a_panel_that_would_be_empty_is_left_out() -> None:
    titles = [t for t in texts(drawn(of_one_size({"kvwire tcp": 1.0}))) if t]
    assert [title for title in titles if title.endswith("GB/s")] == ["push, TCP, GB/s"]


def test_names_are_escaped() -> None:
    assert "<a & b>" in texts(drawn(of_one_size({"kvwire tcp": 1.0, "<a & b>": 1.0})))
