"""Lanes over UCX against the conformance kit of lanes, over shared memory and TCP."""

from __future__ import annotations

import pytest

from kvwire.testing.conformance.check import CheckOf
from kvwire.testing.conformance.lanes import LANE_CHECKS, run_lane_check
from kvwire.testing.conformance.lanes.rig import LaneRig
from kvwire_ucx import UcxBackend
from tests.backends.kvwire_ucx.support import needs_ucx, transports_of_this_loop
from tests.support.depth import parameters

pytestmark = needs_ucx


@pytest.mark.parametrize(
    "check", parameters(LANE_CHECKS, every=4), ids=lambda check: check.id
)
async def test_it_keeps_every_promise(check: CheckOf[LaneRig]) -> None:
    settings = {"TLS": transports_of_this_loop()}
    result = await run_lane_check(check, UcxBackend, settings)
    assert result.passed, result.reason
