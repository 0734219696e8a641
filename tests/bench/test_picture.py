"""The picture of a benchmark; numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from kvwire.cli.bench.report import Common
from kvwire.cli.bench.turns import GIGABYTES_PER_SECOND, Benchmark
from tests.bench import picture
from tests.bench.picture import colors, draw
from tests.cli.bench.contenders import Scripted, benchmark, case, rated

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def document(whole: Benchmark, rounds: int, path: Path) -> dict[str, Any]:
    Common(json=path).run(whole, rounds=rounds)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture
def found(tmp_path: Path) -> Path:
    return tmp_path / "found.json"


def bars(axes: Axes) -> list[float]:
    widths = [container.datavalues for container in axes.containers]  # type: ignore[attr-defined]
    return [float(width) for bar in widths for width in bar]


def texts(axes: Axes) -> list[str]:
    return [text.get_text().strip() for text in axes.texts]


def test_rates_are_bars_with_a_line_from_the_smallest_to_the_99th_percentile(
    found: Path,
) -> None:
    ours = rated("kvwire", 2e9, 2e9, 1e9, 2e9, 3e9)
    contenders = ours, rated("b", 4e9), Scripted("c", failing="round")
    row = case(*contenders, unit=GIGABYTES_PER_SECOND)
    (axes,) = draw(document(benchmark(row), 4, found)).axes
    assert bars(axes) == pytest.approx([2.0, 4.0])
    assert texts(axes) == ["2", "4"]
    assert axes.get_xlim()[0] == 0
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1 KiB send"]
    assert axes.get_title(loc="left") == "GB/s"
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == pytest.approx([1.0, 3.0])


def test_times_are_points_on_a_logarithmic_axis_in_a_panel_of_their_own(
    found: Path,
) -> None:
    """From 20 us to 20 ms no bar could be compared with another."""
    slow, fast = Scripted("kvwire", [[2e-2]]), Scripted("b", [[2e-5]])
    both = rated("kvwire", 1e9), rated("b", 1e9)
    rates = case(*both, unit=GIGABYTES_PER_SECOND)
    whole = benchmark(rates, case(slow, fast))
    first, axes = draw(document(whole, 2, found)).axes
    assert axes.get_xscale() == "log"
    points = [line for line in axes.lines if line.get_marker() == "o"]
    xs = np.concatenate([point.get_xdata() for point in points])
    assert xs.tolist() == pytest.approx([2e4, 20.0])
    assert texts(axes) == ["2e+04", "20"]
    # Everybody has one colour in both.
    assert len(first.patches) == len(points) == 2


def test_the_picture_is_written(found: Path) -> None:
    document(benchmark(case(Scripted("kvwire", [[1.0]]))), 1, found)
    picture.command(found, found.with_suffix(".svg"))
    assert ET.parse(found.with_suffix(".svg")).getroot().tag.endswith("svg")


@pytest.mark.parametrize("count", [1, 20, 33])
def test_everybody_has_a_colour_of_their_own(count: int) -> None:
    names = [str(number) for number in range(count)]
    shades = colors(names)
    assert list(shades) == names
    assert len(set(shades.values())) == count
