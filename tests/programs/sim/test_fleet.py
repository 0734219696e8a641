"""A small fleet in virtual time; ``tests.programs.sim.fleet`` runs large ones too."""

from __future__ import annotations

from kvwire.directory.base import DIRECTORY_RETRY_S_MAX
from tests.programs.sim.fleet import AWAY_S, NOTICED_S, simulate
from tests.support import virtual_time


def test_a_fleet_of_forty() -> None:
    """No request fails, death is noticed without the directory, few blocks move."""
    rows = virtual_time.run(simulate(nodes=40, proxies=4, rate=100))
    by_name = {row["phase"]: row for row in rows}
    assert not any(row["failed"] for row in rows)
    for name in ("steady", "killed", "away", "stragglers"):
        assert by_name[name]["steady_s"] <= 2 * NOTICED_S
    assert by_name["rolling"]["steady_s"] <= 3
    late = by_name["partition"]["steady_s"] - AWAY_S
    assert 0 < late <= DIRECTORY_RETRY_S_MAX + 1
    for name, share in (("rolling", 0.25), ("killed", 0.15), ("steady", 0)):
        assert by_name[name]["moved"] <= share
