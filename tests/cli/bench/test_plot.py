"""The picture: a panel for each group, a bar or a point for each who was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvwire.cli.bench.plot import draw
from kvwire.cli.bench.turns import MICROSECONDS, Benchmark, take_turns
from tests.cli.bench.contenders import Scripted, benchmark, case

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def drawn(whole: Benchmark, rounds: int = 2) -> list[Axes]:
    pictures = draw(whole, take_turns(whole, rounds, lambda _: None))
    assert list(pictures) == [""]
    return pictures[""].axes


def bars(axes: Axes) -> list[float]:
    widths = [container.datavalues for container in axes.containers]  # type: ignore[attr-defined]
    return [float(width) for bar in widths for width in bar]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_bars_are_as_long_as_the_medians() -> None:
    (axes,) = drawn(
        benchmark(case(Scripted("kvwire", [[1e9, 2e9, 3e9]]), Scripted("b", [[4e9]])))
    )
    assert bars(axes) == pytest.approx([2.0, 4.0])
    assert texts(axes) == ["2", "4"]
    assert axes.get_xlim()[0] == 0
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1 KiB send"]
    assert axes.get_title(loc="left") == "GB/s"


def test_the_thin_line_goes_from_the_smallest_to_the_99th_percentile() -> None:
    (axes,) = drawn(benchmark(case(Scripted("kvwire", [[1e9, 2e9, 9e9]]))))
    (line,) = axes.lines
    assert np.asarray(line.get_xdata()).tolist() == pytest.approx([1.0, 9.0])


def test_times_are_points_on_a_logarithmic_axis() -> None:
    """From 20 us to 20 ms no bar could be compared with another."""
    times = case(
        Scripted("kvwire", [[2e-2]]), Scripted("b", [[2e-5]]), unit=MICROSECONDS
    )
    (axes,) = drawn(benchmark(times))
    assert axes.get_xscale() == "log"
    points = [line.get_xdata() for line in axes.lines if line.get_marker() == "o"]
    assert np.concatenate(points).tolist() == pytest.approx([2e4, 20.0])
    assert texts(axes) == ["2e+04", "20"]


def test_each_group_has_its_own_scale_and_everybody_one_colour() -> None:
    peer = Scripted("b", [[1e9]])
    slow = case(Scripted("kvwire", [[1e8]]), peer, group="slow")
    fast = case(Scripted("kvwire", [[9e9]]), peer, group="fast")
    first, second = drawn(benchmark(slow, fast))
    assert first.get_xlim()[1] < 2 < 9 < second.get_xlim()[1]
    shades = [[bar.get_facecolor() for bar in axes.patches] for axes in (first, second)]
    assert shades[0] == shades[1]
    assert len(set(shades[0])) == 2


def test_who_failed_is_not_in_it() -> None:
    whole = benchmark(case(Scripted("kvwire"), Scripted("b", failing="round")))
    (axes,) = drawn(whole)
    assert len(bars(axes)) == 1
