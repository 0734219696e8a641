"""Lanes of `local` keep every promise, whichever way they read."""

from __future__ import annotations

import pytest

from kvwire.testing.conformance.check import CheckOf
from kvwire.testing.conformance.lanes import LANE_CHECKS, run_lane_check
from kvwire.testing.conformance.lanes.rig import LaneRig
from kvwire_local import LocalBackend

WAYS = ("auto", "cma", "arena")


@pytest.mark.parametrize("check", LANE_CHECKS, ids=lambda check: check.id)
@pytest.mark.parametrize("way", WAYS)
async def test_local(way: str, check: CheckOf[LaneRig]) -> None:
    result = await run_lane_check(check, LocalBackend, {"way": way})
    assert result.passed, result.reason
