"""What a benchmark is made of: who takes part, and what samples come to."""

from __future__ import annotations

import pytest

from kvwire.cli.bench.case import Sample, Samples
from kvwire.limits import GIB
from tests.cli.bench.contenders import WORK, Scripted, benchmark, case


def test_a_round_moves_all_its_operations() -> None:
    assert WORK.moved_bytes == WORK.nbytes * WORK.count


def test_a_case_needs_ours_alone() -> None:
    ours, beside = Scripted("ours"), Scripted("beside")
    row = case(ours, beside)
    assert row.contenders == [ours, beside]
    assert row.required == [ours]


def test_who_takes_part_in_several_cases_is_there_once() -> None:
    """By who it is and not by its name."""
    ours, beside, namesake = Scripted("ours"), Scripted("beside"), Scripted("beside")
    whole = benchmark(case(ours, beside), case(ours, namesake))
    assert whole.contenders == [ours, beside, namesake]


def test_samples_of_all_rounds_in_their_order() -> None:
    samples = Samples([Sample([3.0, 1.0], 1, 0.0), Sample([2.0], 1, 0.0)])
    assert samples.values == [3.0, 1.0, 2.0]


def test_cpu_for_a_gib_is_the_median_of_the_rounds() -> None:
    rounds = [Sample([1.0], GIB // 2, cpu_s) for cpu_s in (0.5, 9.0, 1.0)]
    assert Samples(rounds).cpu_s_per_gib == 2.0


def test_cpu_of_each_side_where_it_is_known() -> None:
    rounds = [
        Sample([1.0], GIB // 2, 0.0, sides)
        for sides in ((1.0, 5.0), None, (2.0, 3.0), (9.0, 4.0))
    ]
    assert Samples(rounds).sides_cpu_s_per_gib == pytest.approx((4.0, 8.0))
    assert Samples(rounds[1:2]).sides_cpu_s_per_gib is None
