"""Each planted bug is found by the simulator within a few seeds (goal Q6)."""

from __future__ import annotations

import sys

import pytest

from tests.fault.planted import BUGS, SEEDS, Planted, planted
from tests.sim import run
from tests.support.depth import parameters


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", parameters(BUGS, every=20), ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Planted) -> None:
    with planted(bug) as other:
        results = map(other.run_seed, range(SEEDS))
        failed = next((result for result in results if result.error), None)
    assert failed is not None, f"not found in {SEEDS} seeds"
    assert failed.rule in bug.rules, f"found as {failed.rule}: {failed.error}"


def test_what_was_imported_before_is_untouched() -> None:
    before = sys.modules["kvwire.proto.connection"]
    with planted(BUGS[0]) as other:
        assert other is not run
        assert sys.modules["kvwire.proto.connection"] is not before
    assert sys.modules["kvwire.proto.connection"] is before
    assert run.run_seed(0).error is None
