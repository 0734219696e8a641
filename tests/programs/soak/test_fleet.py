"""A fleet that is restarted and killed, and its directory as well: nothing is wrong."""

from __future__ import annotations

import pytest

from tests.programs.soak.fleet import soak


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "redis", "nats"])
async def test_no_request_is_wrong_or_stuck_while_members_come_and_go(
    kind: str,
) -> None:
    fleet = await soak(kind, requests=100, each=2, fault_s=2.0, outage_s=1.0, seed=1)
    assert fleet.counts["requests"] == 100
    assert fleet.counts["wrong"] == 0
    assert fleet.counts["failed"] == 0
    assert fleet.counts["server killed"] == (kind != "file")
