"""The conformance kit of lanes: it passes what is right and finds what is wrong."""

from __future__ import annotations

import pytest

from kvwire.testing.conformance.check import CheckOf
from kvwire.testing.conformance.lanes import LANE_CHECKS, run_lane_check
from kvwire.testing.conformance.lanes.rig import LaneRig
from tests.backends.handover import HandoverBackend


@pytest.mark.parametrize("check", LANE_CHECKS, ids=lambda check: check.id)
async def test_the_reference_keeps_every_promise(check: CheckOf[LaneRig]) -> None:
    result = await run_lane_check(check, HandoverBackend)
    assert result.passed, result.reason
