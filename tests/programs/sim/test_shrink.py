"""A failing plan becomes small and still fails in the same way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvwire.proto.regions import Grants
from tests.backends.planted import planted_in
from tests.fault.test_planted import SEEDS, begins_at_the_beginning
from tests.programs.sim import run
from tests.programs.sim.__main__ import main


@pytest.fixture
def bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the core that the simulator runs: a put goes beside its place."""
    planted_in(Grants.check, begins_at_the_beginning)(monkeypatch)


def first_failure() -> int:
    return next(seed for seed in range(SEEDS) if run.run_seed(seed).error)


@pytest.mark.usefixtures("bug")
def test_the_smallest_plan_fails_by_the_same_rule() -> None:
    """And no step of it can be left out."""
    failed = run.run_seed(first_failure())
    small = run.shrink(failed)
    assert small.result.rule == failed.rule
    assert len(small.keep) < len(failed.plan.steps) / 3
    plan = small.result.plan
    assert (plan.setup.late, plan.setup.stuck, plan.setup.slow) == (0, 0, 0)
    again = run.run_seed(failed.plan.seed, small.keep)
    assert again.rule == failed.rule, "its steps fail under the seed's own conditions"
    for number in range(len(plan.steps)):
        steps = plan.steps[:number] + plan.steps[number + 1 :]
        assert run.run_plan(replace(plan, steps=steps)).rule != failed.rule


@pytest.mark.usefixtures("bug")
def test_a_failure_is_told_with_the_command_that_repeats_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seed = first_failure()
    assert main(["--seeds", "1", "--start", str(seed)]) == 1
    told = capsys.readouterr().out
    assert "1 failed" in told
    assert f"repeat it: python -m tests.programs.sim --seed {seed} --trace" in told
    assert main(["--seed", str(seed)]) == 1
    told = capsys.readouterr().out
    assert "smallest failing plan" in told
    (keep,) = [line.split("--keep ")[1] for line in told.splitlines() if "--k" in line]
    assert main(["--seed", str(seed), "--trace", "--keep", keep]) == 1
    assert "smallest" not in capsys.readouterr().out


@pytest.mark.slow
def test_seeds_that_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "60", "--jobs", "2"]) == 0
    side_by_side = capsys.readouterr().out
    assert main(["--seeds", "60"]) == 0
    in_a_row = capsys.readouterr().out
    assert "0 failed" in side_by_side
    assert side_by_side.split("trace")[1] == in_a_row.split("trace")[1]
    assert main(["--seed", "1"]) == 0
    assert "seed 1 passes" in capsys.readouterr().out
