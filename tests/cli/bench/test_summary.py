"""Medians, percentiles and ratios, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.cli.bench.case import MICROSECONDS, Samples
from kvwire.cli.bench.summary import Summary, compare
from kvwire.cli.bench.turns import CaseResult
from tests.cli.bench.contenders import WORK, Scripted, case

SOME = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=200)


def samples(*rounds: list[float]) -> Samples:
    scripted = Scripted("x", rounds)
    return Samples([scripted.round(WORK) for _ in rounds])


def test_five_numbers() -> None:
    found = Summary.of([5.0, 1.0, 2.0, 100.0, 3.0])
    assert (found.count, found.median, found.low, found.high) == (5, 3.0, 1.0, 100.0)
    assert found.mad == 2.0
    assert found.p99 == 100.0


def test_the_99th_of_200_is_the_198th() -> None:
    assert Summary.of([float(n) for n in range(1, 201)]).p99 == 198.0


@given(SOME)
def test_as_numpy_has_it(values: list[float]) -> None:
    found = Summary.of(values)
    assert found.median == pytest.approx(np.median(values))
    assert found.p99 == np.percentile(values, 99, method="inverted_cdf")
    assert found.mad == pytest.approx(
        np.median(np.abs(np.array(values) - np.median(values)))
    )
    assert found.low <= found.median <= found.p99 <= found.high


def test_a_rate_is_compared_with_the_highest() -> None:
    ours, slow, fast = (Scripted(name) for name in ("ours", "slow", "fast"))
    found = compare(
        CaseResult(
            case(ours, slow, fast, target=0.9),
            {
                "ours": samples([8.0], [10.0]),
                "slow": samples([4.0], [6.0]),
                "fast": samples([10.0], [10.0]),
            },
        )
    )
    assert (found.best, found.ratio, found.met) == ("fast", 0.9, True)
    assert (found.low, found.high) == (0.8, 1.0)


def test_a_time_is_compared_with_the_lowest() -> None:
    ours, slow, fast = (Scripted(name) for name in ("ours", "slow", "fast"))
    found = compare(
        CaseResult(
            case(ours, slow, fast, unit=MICROSECONDS, target=1.3),
            {
                "ours": samples([2.0, 4.0, 3.0]),
                "slow": samples([9.0]),
                "fast": samples([2.0]),
            },
        )
    )
    assert (found.best, found.ratio, found.met) == ("fast", 1.5, False)


def test_nobody_beside_it_means_no_verdict() -> None:
    found = compare(CaseResult(case(Scripted("ours")), {"ours": samples([1.0])}))
    assert (found.best, found.ratio, found.met) == ("", None, None)


def test_cpu_seconds_are_for_a_gib() -> None:
    # Half a second for 4 KiB in each round, as the contender says.
    assert samples([1.0], [2.0]).cpu_s_per_gib == 0.5 * 2**30 / 4096
