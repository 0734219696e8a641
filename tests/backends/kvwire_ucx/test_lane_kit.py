"""Lanes over UCX against the conformance kit of lanes, over shared memory and TCP."""

from __future__ import annotations

import pytest

from kvwire.testing.conformance.check import CheckOf
from kvwire.testing.conformance.lanes import LANE_CHECKS, run_lane_check
from kvwire.testing.conformance.lanes.rig import LaneRig
from kvwire_ucx import UcxBackend, one_sided
from tests.backends.kvwire_ucx.support import (
    SHARED_MEMORY,
    needs_reading,
    needs_ucx,
    transports_of_this_loop,
)
from tests.support.depth import parameters

pytestmark = needs_ucx


@pytest.mark.parametrize("reads", ["no", pytest.param("yes", marks=needs_reading)])
@pytest.mark.parametrize(
    "check", parameters(LANE_CHECKS, every=4), ids=lambda check: check.id
)
async def test_it_keeps_every_promise(
    check: CheckOf[LaneRig], reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One-sided, all that can be lent is lent, and not only what is large."""
    monkeypatch.setattr(one_sided, "LENT_BYTES_MIN", 1)
    tls = SHARED_MEMORY if reads == "yes" else transports_of_this_loop()
    settings = {"TLS": tls, "one_sided": reads}
    result = await run_lane_check(check, UcxBackend, settings)
    assert result.passed, result.reason
