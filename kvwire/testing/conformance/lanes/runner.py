"""Runs the checks of lanes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from kvwire import registry
from kvwire.backend import Backend
from kvwire.errors import UsageError
from kvwire.testing.conformance.check import CheckOf
from kvwire.testing.conformance.lanes.groups import (
    aborting,
    callbacks,
    closing,
    joining,
    leaks,
    memory,
    payloads,
    pressure,
    tickets,
)
from kvwire.testing.conformance.lanes.rig import LaneRig
from kvwire.testing.conformance.report import Report, Result
from kvwire.testing.conformance.runner import TIMEOUT_S, reason_of
from kvwire.types import Address

LANE_CHECKS: tuple[CheckOf[LaneRig], ...] = tuple(
    check
    for module in (
        joining,
        payloads,
        memory,
        callbacks,
        pressure,
        closing,
        aborting,
        tickets,
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
    progress: Callable[[Result], None] | None = None,
) -> Report:
    """Hold a backend's lanes against the contract of :mod:`kvwire.lane`.

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
    results = []
    for check in _chosen(only):
        results.append(await run_lane_check(check, cls, settings, timeout_s, address))
        if progress is not None:
            progress(results[-1])
    report = Report(backend=cls.scheme, results=tuple(results))
    if raising:
        report.raise_for_failures()
    return report


async def run_lane_check(
    check: CheckOf[LaneRig],
    make: Callable[[], Backend],
    settings: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    address: Address | None = None,
) -> Result:
    """Run one check, and look for what it leaves behind.

    Cancel safety: safe, lanes of the check may stay open.
    """
    began = time.perf_counter()
    reason = ""
    try:
        rig = LaneRig(make, settings or {}, timeout_s, address)
        try:
            await rig.listen()
            await check.run(rig)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the check failed
            reason = reason_of(exc)
        try:
            await rig.aclose()
        except Exception as exc:  # noqa: BLE001 - likewise
            reason = reason or f"afterwards: {reason_of(exc)}"
    except Exception as exc:  # noqa: BLE001 - the backend cannot even be made
        reason = reason_of(exc)
    return Result(check=check, seconds=time.perf_counter() - began, reason=reason)


def _chosen(only: Collection[str] | None) -> tuple[CheckOf[LaneRig], ...]:
    if only is None:
        return LANE_CHECKS
    unknown = set(only) - {check.id for check in LANE_CHECKS}
    if unknown:
        raise UsageError(
            f"conformance: no check of lanes is called {', '.join(sorted(unknown))}"
        )
    return tuple(check for check in LANE_CHECKS if check.id in only)
