"""The picture of forged rates: what is drawn, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvwire.cli.bench.case import Benchmark
from kvwire.cli.bench.fragments_plot import draw
from kvwire.limits import KIB, MIB
from tests.cli.bench.forged import ACROSS, RATES, measured, of_one_size, plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


def drawn(benchmark: Benchmark) -> Figure:
    (figure,) = draw(benchmark, measured(benchmark)).values()
    return figure


def lines(axes: Axes) -> list[Line2D]:
    return list(axes.get_lines())


def sizes(line: Line2D) -> list[int]:
    found: list[int] = np.asarray(line.get_xdata()).tolist()
    return found


def named(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_each_has_a_line_for_each_layout() -> None:
    push, pull = drawn(plan()).axes
    assert push.get_title(loc="left") == "push, TCP, GB/s"
    assert pull.get_title(loc="left") == "pull, TCP, GB/s"
    for axes in (push, pull):
        full = [line for line in lines(axes) if line.get_linestyle() == "-"]
        hollow = [line for line in lines(axes) if line.get_linestyle() == "--"]
        assert [sizes(line) for line in full] == [[4 * KIB, MIB]] * 3
        assert [sizes(line) for line in hollow] == [[4 * KIB]] * len(ACROSS)
        assert {line.get_markerfacecolor() for line in hollow} == {"white"}
    ours = lines(push)[0]
    assert np.asarray(ours.get_ydata()).tolist() == pytest.approx([3.0, 4.0])


def test_everybody_has_one_colour_and_one_place_in_the_legend() -> None:
    push, pull = drawn(plan()).axes
    assert named(pull) == list(RATES)
    shades: dict[object, set[object]] = {}
    for axes in (push, pull):
        for line in lines(axes):
            name = str(line.get_label()).removeprefix("_")
            shades.setdefault(name, set()).add(line.get_color())
    assert set(shades) == set(RATES)
    assert all(len(colors) == 1 for colors in shades.values())
    assert len(set.union(*shades.values())) == len(RATES)


def test_who_failed_everywhere_is_not_in_it() -> None:
    benchmark = of_one_size({"kvwire tcp": 1.0, "nixl tcp": 1.0}, failing="nixl tcp")
    (axes,) = drawn(benchmark).axes
    assert named(axes) == ["kvwire tcp"]


def test_both_axes_are_logarithmic_and_the_same_in_all_panels() -> None:
    push, pull = drawn(plan()).axes
    for axes in (push, pull):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert push.get_ylim() == pull.get_ylim()
    assert [t.get_text() for t in push.get_xticklabels()] == ["4 KiB", "1 MiB"]


def test_a_panel_that_would_be_empty_is_left_out() -> None:
    assert len(drawn(of_one_size({"kvwire tcp": 1.0})).axes) == 1
