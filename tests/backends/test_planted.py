"""The conformance kits find bugs: each planted one is caught by the checks it names.

A plant changes one method of the reference backend, the way a real backend gets it
wrong. Every check that a plant names passes on the reference as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from kvwire_certify.conformance import Report, check_backend, check_lanes
from kvwire_certify.conformance.runner import LANE_CHECKS
from tests.backends import planted_lanes, planted_links, planted_windows
from tests.backends.planted import Plant, Plants

# A planted bug may make the kit wait in vain; nothing here takes as long by itself.
_TIMEOUT_S = 0.4
_KITS = (
    (check_backend, planted_links.PLANTS),
    (check_lanes, planted_lanes.PLANTS),
    (check_lanes, planted_windows.PLANTS),
)


# The bugs are in code that treats all loops alike.
@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize(
    ("kit", "plants", "plant", "checks"),
    [
        pytest.param(kit, plants, *bug, id=f"{kit.__name__}-{bug[0].__name__}")
        for kit, plants in _KITS
        for bug in plants.bugs
    ],
)
async def test_a_planted_bug_is_caught(
    kit: Callable[..., Awaitable[Report]],
    plants: Plants,
    plant: Plant,
    checks: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the check, and it was the backend that failed, not the plant."""
    for check in checks:
        with monkeypatch.context() as patch:
            plant(patch)
            report = await kit(
                "inproc", only=[check], timeout_s=_TIMEOUT_S, raising=False
            )
        plants.clean_up()
        (failed,) = report.failed
        assert not failed.reason.startswith(("AttributeError", "NameError"))


async def test_a_lane_that_reads_windows_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader in which the bugs are planted has none by itself."""
    planted_windows.reads_windows(monkeypatch)
    checks = [c.id for c in LANE_CHECKS if c.id.startswith("windows.")]
    report = await check_lanes("inproc", only=checks)
    assert len(report.passed) == len(checks) == 6
