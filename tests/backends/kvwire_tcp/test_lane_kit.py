"""Lanes over TCP against the conformance kit of lanes, over real sockets."""

from __future__ import annotations

import pytest

from kvwire.testing.conformance.lanes import LANE_CHECKS, run_lane_check
from kvwire.testing.conformance.lanes.rig import LaneCheck
from kvwire_tcp import TcpBackend
from tests.backends.kvwire_tcp.recorder import ANYWHERE


@pytest.mark.parametrize("check", LANE_CHECKS, ids=lambda check: check.id)
async def test_it_keeps_every_promise(check: LaneCheck) -> None:
    result = await run_lane_check(check, TcpBackend, address=ANYWHERE)
    assert result.passed, result.reason
