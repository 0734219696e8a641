"""The conformance kit of lanes: what every data path beside a control link must do.

>>> report = await check_lanes("local")

or, from a shell, ``python -m kvwire.testing.conformance local --lanes``. Both sides of
a lane run in one process; what takes two is for the backend's own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from kvwire.backend import Backend, registry
from kvwire.errors import UsageError
from kvwire.testing.conformance.groups import (
    aborting,
    callbacks,
    closing,
    descriptors,
    joining,
    leaks,
    memory,
    payloads,
    pressure,
)
from kvwire.testing.conformance.report import Report, Result
from kvwire.testing.conformance.rig import LaneCheck, LaneRig
from kvwire.testing.conformance.runner import TIMEOUT_S, chosen, run_all, run_on
from kvwire.types import Address

LANE_CHECKS: tuple[LaneCheck, ...] = (
    *joining.lanes.checks,
    *payloads.lanes.checks,
    *memory.lanes.checks,
    *callbacks.lanes.checks,
    *pressure.lanes.checks,
    *closing.lanes.checks,
    *aborting.lanes.checks,
    *descriptors.lanes.checks,
    *leaks.lanes.checks,
)
"""Every check of lanes, in the order they run."""


async def check_lanes(
    backend: type[Backend] | str,
    *,
    settings: Mapping[str, str] | None = None,
    address: Address | None = None,
    only: Collection[str] | None = None,
    timeout_s: float = TIMEOUT_S,
    raising: bool = True,
    first_only: bool = False,
    progress: Callable[[Result], None] | None = None,
) -> Report:
    """Hold a backend's lanes against the contract of :mod:`kvwire.backend.lane`.

    Args:
        backend: A class, which is made twice for each check, once for each side; or the
            scheme of an installed one.
        settings: The user's settings for it, such as which of its ways to use.
        address: Where the backend is to listen, for lanes that dial the address of the
            control link: any free port or name. By default port 0 of the loopback
            address, for a backend that has links to other processes.
        only: Ids of the checks to run; by default all of :data:`LANE_CHECKS`.
        timeout_s: How long anything that a lane promises may take.
        raising: Whether a failed check raises in the end.
        first_only: Stop at the first check that fails.
        progress: Is told of each result as it comes.

    Raises:
        BackendUnavailable: No installed backend has that scheme.
        UsageError: The backend has no lanes, or a check is not known.
        CheckFailed: A check failed, and ``raising`` is true.

    Cancel safety: safe, lanes of the check under way may stay open.
    """
    cls = registry.load(backend) if isinstance(backend, str) else backend
    if not cls.capabilities.lanes:
        raise UsageError(f"conformance: backend {cls.scheme!r} says it has no lanes")
    if address is None and cls.capabilities.links and not cls.capabilities.same_process:
        address = Address(cls.scheme, "127.0.0.1")
    return await run_all(
        cls.scheme,
        chosen(LANE_CHECKS, only, " of lanes"),
        lambda: LaneRig(cls, settings or {}, timeout_s, address),
        raising=raising,
        first_only=first_only,
        progress=progress,
    )


async def run_lane_check(
    check: LaneCheck,
    make: Callable[[], Backend],
    settings: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    address: Address | None = None,
) -> Result:
    """Run one check, and look for what it leaves behind.

    Cancel safety: safe, lanes of the check may stay open.
    """
    return await run_on(
        lambda: LaneRig(make, settings or {}, timeout_s, address), check
    )
