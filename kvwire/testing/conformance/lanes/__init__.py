"""The conformance kit of lanes: what every data path beside a control link must do.

>>> report = await check_lanes("local")

or, from a shell, ``python -m kvwire.testing.conformance local --lanes``. Both sides of
a lane run in one process; what takes two is for the backend's own tests.
"""

from kvwire.testing.conformance.lanes.runner import (
    LANE_CHECKS,
    check_lanes,
    run_lane_check,
)

__all__ = ["LANE_CHECKS", "check_lanes", "run_lane_check"]
