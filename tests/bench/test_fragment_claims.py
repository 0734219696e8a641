"""What is aimed at, judged by forged rates."""

from __future__ import annotations

from typing import Final

import pytest

from kvwire.cli.bench.fragments import VERBS, work_of
from kvwire.cli.bench.report import Findings
from kvwire.cli.bench.turns import Case
from kvwire.limits import KIB, MIB
from tests.bench.fragment_claims import (
    CLAIMS,
    LARGE,
    SMALL,
    Rates,
    judge,
)
from tests.cli.bench.contenders import Scripted, case, measured

# GB/s by size, and across layers.
RATES: Final = {
    "kvwire tcp": {4 * KIB: 3.0, 1 * MIB: 4.0},
    "nixl tcp": {4 * KIB: 0.5, 1 * MIB: 2.0},
    "iperf3": {4 * KIB: 0.25, 1 * MIB: 1.0},
}
ACROSS: Final = {"kvwire tcp": 3.6, "nixl tcp": 2.5}


def row(rates: dict[str, float], verb: str, size: int, across: bool = False) -> Case:
    """GB/s of everybody in one case."""
    work = work_of(verb, size, cross_layer=across, round_bytes=MIB)
    everybody = [Scripted(name, [[rate * 1e9]]) for name, rate in rates.items()]
    return case(*everybody, work=work, essential=False)


def plan() -> Findings:
    rows = [
        row({name: rates[size] for name, rates in RATES.items()}, verb, size)
        for verb in VERBS
        for size in (4 * KIB, 1 * MIB)
    ]
    rows += [row(ACROSS, verb, 4 * KIB, across=True) for verb in VERBS]
    return measured(*rows, rounds=2)


def of_one_size(rates: dict[str, float]) -> Findings:
    return measured(row(rates, "push", 4 * KIB))


def test_targets_are_judged_by_medians() -> None:
    verdicts = {
        (v.claim.target, v.best): v for v in judge(Rates(plan())) if v.verb == "push"
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
    (verdict,) = judge(Rates(equal))
    assert verdict.ratio == 1.0
    assert not verdict.met


def test_rates_are_found_by_who_which_way_size_and_layout() -> None:
    rates = Rates(plan())
    assert rates.median("nixl tcp", "pull", SMALL) == RATES["nixl tcp"][SMALL] * 1e9
    across = rates.median("nixl tcp", "pull", SMALL, cross_layer=True)
    assert across == ACROSS["nixl tcp"] * 1e9
    samples = rates.samples("nixl tcp", "pull", LARGE)
    assert samples is not None
    assert samples.values == [2e9, 2e9]
    assert rates.median("nixl tcp", "pull", 16 * KIB) is None
    assert rates.samples("nobody", "pull", SMALL) is None


def test_the_best_is_the_fastest_of_those_that_took_part() -> None:
    rates = Rates(of_one_size({"kvwire tcp": 3.0, "a": 1.0, "b": 2.0}))
    assert rates.best(["a", "b", "absent"], "push", SMALL) == ("b", 2e9)
    assert rates.best(["absent"], "push", SMALL) is None


def test_a_claim_without_its_contenders_is_not_judged() -> None:
    """Neither without us, nor without them, nor for a verb that was not measured."""
    for names in ({"kvwire tcp": 3.0}, {"nixl tcp": 3.0}):
        assert judge(Rates(of_one_size(names))) == []
    both = of_one_size({"kvwire tcp": 3.0, "nixl tcp": 1.0})
    assert [verdict.verb for verdict in judge(Rates(both))] == ["push"]


def test_claims_are_about_sizes_that_are_measured() -> None:
    assert {claim.layer_bytes for claim in CLAIMS} == {SMALL, LARGE} == {4 * KIB, MIB}
    assert all(claim.target > 0 and claim.others for claim in CLAIMS)
