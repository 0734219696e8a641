"""Runs the checks of lanes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

from kvwire.backend import Backend, registry
from kvwire.errors import UsageError
from kvwire.testing.conformance.lanes.groups import (
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
from kvwire.testing.conformance.lanes.rig import LaneCheck, LaneRig
from kvwire.testing.conformance.report import Report, Result
from kvwire.testing.conformance.runner import TIMEOUT_S, chosen, run_all, run_on
from kvwire.types import Address

LANE_CHECKS: tuple[LaneCheck, ...] = tuple(
    check
    for module in (
        joining,
        payloads,
        memory,
        callbacks,
        pressure,
        closing,
        aborting,
        descriptors,
        leaks,
    )
    for check in module.group.checks
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

    def run(check: LaneCheck) -> Awaitable[Result]:
        return run_lane_check(check, cls, settings, timeout_s, address)

    checks = chosen(LANE_CHECKS, only, " of lanes")
    return await run_all(cls.scheme, checks, run, first_only, progress, raising)


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
