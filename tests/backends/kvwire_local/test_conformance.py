"""Lanes of `local` keep every promise, whichever way they read."""

from __future__ import annotations

import pytest

from kvwire.testing.conformance.lanes import LANE_CHECKS, run_lane_check
from kvwire.testing.conformance.lanes.rig import LaneCheck
from kvwire_local import LocalBackend

CHECKS = pytest.mark.parametrize("check", LANE_CHECKS, ids=lambda check: check.id)


@CHECKS
async def test_local(check: LaneCheck) -> None:
    result = await run_lane_check(check, LocalBackend)
    assert result.passed, result.reason


@pytest.mark.matrix
@CHECKS
@pytest.mark.parametrize("way", ["cma", "arena"])
# What differs from `auto` treats all loops alike.
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_each_way_alone(way: str, check: LaneCheck) -> None:
    result = await run_lane_check(check, LocalBackend, {"way": way})
    assert result.passed, result.reason
