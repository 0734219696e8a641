"""What is aimed at, judged by forged rates."""

from __future__ import annotations

import pytest

from kvwire.cli.bench.fragments import VERBS
from kvwire.limits import KIB, MIB
from tests.bench.fragment_claims import (
    CLAIMS,
    LARGE,
    SMALL,
    Rates,
    judge,
)
from tests.cli.bench.forged import ACROSS, RATES, measured, of_one_size, plan


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
    equal = of_one_size({"kvwire tcp": 1.0, "nixl tcp": 1.0})
    (verdict,) = judge(Rates(measured(equal)), VERBS)
    assert verdict.ratio == 1.0
    assert not verdict.met


def test_rates_are_found_by_who_which_way_size_and_layout() -> None:
    rates = Rates(measured(plan()))
    assert rates.median("nixl tcp", "pull", SMALL) == RATES["nixl tcp"][SMALL] * 1e9
    across = rates.median("nixl tcp", "pull", SMALL, cross_layer=True)
    assert across == ACROSS["nixl tcp"] * 1e9
    samples = rates.samples("nixl tcp", "pull", LARGE)
    assert samples is not None
    assert samples.values == [2e9, 2e9]
    assert rates.median("nixl tcp", "pull", 16 * KIB) is None
    assert rates.samples("nobody", "pull", SMALL) is None


def test_the_best_is_the_fastest_of_those_that_took_part() -> None:
    rates = Rates(measured(of_one_size({"kvwire tcp": 3.0, "a": 1.0, "b": 2.0})))
    assert rates.best(["a", "b", "absent"], "push", SMALL) == ("b", 2e9)
    assert rates.best(["absent"], "push", SMALL) is None


def test_a_claim_without_its_contenders_is_not_judged() -> None:
    """Neither without us, nor without them, nor for a verb that was not measured."""
    for names in ({"kvwire tcp": 3.0}, {"nixl tcp": 3.0}):
        assert judge(Rates(measured(of_one_size(names))), VERBS) == []
    both = of_one_size({"kvwire tcp": 3.0, "nixl tcp": 1.0})
    assert judge(Rates(measured(both)), ["pull"]) == []


def test_claims_are_about_sizes_that_are_measured() -> None:
    assert {claim.layer_bytes for claim in CLAIMS} == {SMALL, LARGE} == {4 * KIB, MIB}
    assert all(claim.target > 0 and claim.others for claim in CLAIMS)
