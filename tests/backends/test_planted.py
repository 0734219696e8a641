"""The conformance kits find bugs: each planted one is caught by the checks it names.

A plant changes one method of the reference backend, the way a real backend gets it
wrong. Every check that a plant names passes on the reference as it is.
"""

from __future__ import annotations

import pytest

from kvwire.testing.conformance import CHECKS, Result, run_check
from kvwire.testing.conformance.runner import LANE_CHECKS, run_lane_check
from kvwire.types import Address
from kvwire_inproc import InprocBackend
from tests.backends import planted_lanes, planted_links
from tests.backends.planted import Plant, Plants

# A planted bug may make the kit wait in vain; nothing here takes as long by itself.
_TIMEOUT_S = 0.4
LINK_CHECKS = {check.id: check for check in CHECKS}
CHECKS_OF_LANES = {check.id: check for check in LANE_CHECKS}


def each(plants: Plants) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("plant", "checks"),
        [pytest.param(*bug, id=bug[0].__name__) for bug in plants.bugs],
    )


# The bugs are in code that treats all loops alike.
@pytest.mark.asyncio(loop_factories=["asyncio"])
@each(planted_links.PLANTS)
async def test_a_bug_of_links_is_caught(
    plant: Plant, checks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in checks:
        with monkeypatch.context() as patch:
            plant(patch)
            result = await run_check(
                LINK_CHECKS[check],
                InprocBackend,
                Address("inproc", ""),
                timeout_s=_TIMEOUT_S,
            )
        await planted_links.PLANTS.clean_up()
        expect_caught(result)


@pytest.mark.asyncio(loop_factories=["asyncio"])
@each(planted_lanes.PLANTS)
async def test_a_bug_of_lanes_is_caught(
    plant: Plant, checks: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for check in checks:
        with monkeypatch.context() as patch:
            plant(patch)
            result = await run_lane_check(
                CHECKS_OF_LANES[check], InprocBackend, timeout_s=_TIMEOUT_S
            )
        await planted_lanes.PLANTS.clean_up()
        expect_caught(result)


def expect_caught(result: Result) -> None:
    """The check has failed, and it was the backend that failed, not the plant."""
    assert not result.passed, result.check.id
    assert not result.reason.startswith(("AttributeError", "NameError", "TypeError"))
