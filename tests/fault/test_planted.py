"""Each planted bug is found by the simulator within a few seeds (goal Q6)."""

from __future__ import annotations

import pytest

from tests.backends.planted import Plant
from tests.fault.planted import PLANTS, SEEDS
from tests.programs.sim.run import run_seed


@pytest.mark.parametrize(
    "bug",
    PLANTS.bugs,
    ids=lambda bug: bug[0].__name__,
)
def test_a_planted_bug_is_found(
    bug: tuple[Plant, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, rules = bug
    with monkeypatch.context() as patch:
        plant(patch)
        failed = next(
            (found for found in map(run_seed, range(SEEDS)) if found.error), None
        )
    assert failed is not None, f"not found in {SEEDS} seeds"
    assert failed.rule in rules, f"found as {failed.rule}: {failed.error}"
