"""Runs the checks of links, of lanes, or of anything else that has a rig."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypedDict, Unpack

from kvwire.backend import Backend, Capabilities, registry
from kvwire.errors import UsageError, wrong_type
from kvwire.types import Address
from kvwire_certify.conformance.check import Check, CheckFailed, Report, Result
from kvwire_certify.conformance.groups import (
    beginning,
    callbacks,
    ending,
    memory,
    payloads,
    pressure,
    windows,
)
from kvwire_certify.conformance.rig import LaneRig, LinkRig

# Exceptions that a backend may raise unexpectedly; they fail the check, but do not end
# the kit.
_RAISED: Final = (Exception, asyncio.CancelledError, SystemExit)
# The time limit of operations that a backend on a quiet machine completes at once.
TIMEOUT_S: Final = 5.0

_GROUPS: Final = (
    beginning.address,
    beginning.join,
    payloads.frame,
    payloads.payload,
    payloads.order,
    memory.memory,
    memory.descriptor,
    callbacks.callback,
    pressure.pressure,
    pressure.pause,
    ending.close,
    ending.abort,
    windows.windows,
    beginning.cancel,
    callbacks.isolation,
    memory.leak,
    pressure.threads,
)
CHECKS: tuple[Check, ...] = tuple(c for group in _GROUPS for c in group.of_links)
"""Every check of links, in the order in which they run."""
LANE_CHECKS: tuple[Check, ...] = tuple(c for group in _GROUPS for c in group.of_lanes)
"""Every check of lanes, in the order in which they run."""


class CheckOptions(TypedDict, total=False):
    """Which checks run, and how their results are reported.

    Attributes:
        only: Ids of the checks to run; by default all.
        raising: Whether failed checks raise at the end, as they do by default.
        first_only: Whether to stop at the first check that fails.
        progress: Called with each result as it comes.
    """

    only: Collection[str] | None
    raising: bool
    first_only: bool
    progress: Callable[[Result], None] | None


async def check_backend(
    backend: Backend | type[Backend] | str,
    *,
    address: Address | str | None = None,
    timeout_s: float = TIMEOUT_S,
    **options: Unpack[CheckOptions],
) -> Report:
    """Check a backend against the contract of :mod:`kvwire.backend`.

    It needs no test framework, and runs on the running loop.

    Args:
        backend: A class, which is instantiated twice for each check, once for each
            side; or the scheme of an installed backend; or an instance, which then
            plays both sides.
        address: An address on which checks listen, any number of times: any free port
            or name. By default port 0 of the loopback address, or a free name for a
            backend within one process.
        timeout_s: The time limit for everything that a backend promises.
        **options: See :class:`CheckOptions`.

    Raises:
        BackendUnavailable: No installed backend has that scheme.
        UsageError: The backend has no links, or a check is unknown.
        CheckFailed: A check failed.

    Cancel safety: safe, links of the running check may stay open.
    """
    cls = registry.load(backend) if isinstance(backend, str) else backend
    if not _capabilities(cls).links:
        raise UsageError(
            f"conformance: backend {cls.scheme!r} has no links; use check_lanes for "
            "its lanes"
        )
    make = (lambda: cls) if isinstance(cls, Backend) else cls
    if address is None:
        host = "" if cls.capabilities.same_process else "127.0.0.1"
        address = Address(cls.scheme, host)
    where = Address.parse(address)
    return await run_all(
        cls.scheme,
        CHECKS,
        lambda: LinkRig(make, where, timeout_s),
        **options,
    )


async def check_lanes(
    backend: type[Backend] | str,
    *,
    settings: Mapping[str, str] | None = None,
    address: Address | None = None,
    timeout_s: float = TIMEOUT_S,
    **options: Unpack[CheckOptions],
) -> Report:
    """Check a backend's lanes against the contract of :mod:`kvwire.backend.lane`.

    Args:
        backend: A class, which is instantiated twice for each check, once for each
            side; or the scheme of an installed backend.
        settings: The user's settings for it, for example to choose one of its modes.
        address: The address on which the backend listens, for lanes that dial the
            address of the control link: any free port or name. By default port 0 of the
            loopback address, for a backend that has links to other processes.
        timeout_s: The time limit for everything that a lane promises.
        **options: See :class:`CheckOptions`.

    Raises:
        BackendUnavailable: No installed backend has that scheme.
        UsageError: The backend has no lanes, or a check is unknown.
        CheckFailed: A check failed.

    Cancel safety: safe, lanes of the running check may stay open.
    """
    cls = registry.load(backend) if isinstance(backend, str) else backend
    if not _capabilities(cls).lanes:
        raise UsageError(f"conformance: backend {cls.scheme!r} has no lanes")
    if address is None and cls.capabilities.links and not cls.capabilities.same_process:
        address = Address(cls.scheme, "127.0.0.1")
    return await run_all(
        cls.scheme,
        LANE_CHECKS,
        lambda: LaneRig(cls, settings or {}, timeout_s, address),
        kind=" of lanes",
        **options,
    )


def _capabilities(backend: object) -> Capabilities:
    """Return a backend's capabilities, after checking that it is a backend."""
    kind = backend if isinstance(backend, type) else type(backend)
    if not issubclass(kind, Backend):
        raise wrong_type("conformance", backend, "a kvwire.backend.Backend")
    found: object = getattr(kind, "capabilities", None)
    if not isinstance(found, Capabilities):
        raise UsageError(
            f"conformance: {kind.__name__}.capabilities must be kvwire.backend."
            f"Capabilities, not {found!r}"
        )
    return found


async def run_check(
    check: Check,
    make: Callable[[], Backend],
    address: Address,
    timeout_s: float = TIMEOUT_S,
) -> Result:
    """Run one check, and look for leftovers.

    Cancel safety: safe, links of the check may stay open.
    """
    return await run_one(lambda: LinkRig(make, address, timeout_s), check)


async def run_all(
    scheme: str,
    checks: Sequence[Check],
    make_rig: Callable[[], Any],
    *,
    kind: str = "",
    what: str = "backend",
    **options: Unpack[CheckOptions],
) -> Report:
    """Run checks one after the other, each on a new rig.

    Cancel safety: safe, but objects that the running check has created may remain.
    """
    only = options.get("only")
    if only is not None:
        if unknown := sorted(set(only) - {check.id for check in checks}):
            names = ", ".join(unknown)
            raise UsageError(f"conformance: unknown check{kind} {names}")
        checks = [check for check in checks if check.id in only]
    results: list[Result] = []
    for check in checks:
        results.append(await run_one(make_rig, check))
        if progress := options.get("progress"):
            progress(results[-1])
        if options.get("first_only") and not results[-1].passed:
            break
    report = Report(backend=scheme, results=tuple(results), what=what)
    if options.get("raising", True):
        report.raise_for_failures()
    return report


async def run_one(make_rig: Callable[[], Any], check: Check) -> Result:
    """Run one check on a new rig, and look for leftovers.

    Cancel safety: safe, but objects that the check has created may remain.
    """
    began = time.perf_counter()
    reason = ""
    try:
        rig = make_rig()
        try:
            await rig.open()
            await check.run(rig)
        except _RAISED as exc:  # whatever was raised, the check has failed
            reason = _reason_of(exc)
        try:
            await rig.aclose()
        except _RAISED as exc:
            reason = reason or f"afterwards: {_reason_of(exc)}"
    except _RAISED as exc:  # the backend cannot even be created
        reason = _reason_of(exc)
    return Result(check=check, seconds=time.perf_counter() - began, reason=reason)


def _reason_of(error: BaseException) -> str:
    """Return why a check failed, in one line."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
        raise error  # the kit was cancelled, not the backend's coroutine
    if isinstance(error, CheckFailed):
        return str(error)
    return f"{type(error).__name__}: {error}"
