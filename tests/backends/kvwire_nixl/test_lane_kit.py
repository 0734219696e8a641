"""Lanes over NIXL against the conformance kit of lanes."""

from __future__ import annotations

import pytest

from kvwire.testing.conformance.check import CheckOf
from kvwire.testing.conformance.lanes import LANE_CHECKS, run_lane_check
from kvwire.testing.conformance.lanes.rig import LaneRig
from kvwire_nixl import NixlBackend
from tests.backends.kvwire_nixl.support import needs_nixl
from tests.support.depth import parameters

# Each check makes agents, and each agent a context of UCX: a tenth of a second.
pytestmark = [needs_nixl, pytest.mark.timeout(120)]


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize(
    "check", parameters(LANE_CHECKS, every=8), ids=lambda check: check.id
)
async def test_it_keeps_every_promise(check: CheckOf[LaneRig]) -> None:
    result = await run_lane_check(check, NixlBackend, timeout_s=30)
    assert result.passed, result.reason
