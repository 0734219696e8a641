"""Runs the checks of links."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

from kvwire.backend import Backend, registry
from kvwire.errors import UsageError
from kvwire.testing.conformance.check import CheckFailed, CheckOf
from kvwire.testing.conformance.groups import (
    aborting,
    addresses,
    callbacks,
    cancelling,
    closing,
    flushing,
    frames,
    isolation,
    leaks,
    memory,
    order,
    pausing,
    pressure,
    threads,
)
from kvwire.testing.conformance.report import Report, Result
from kvwire.testing.conformance.rig import Check, Rig
from kvwire.types import Address


class Opened(Protocol):
    """What a check works with, as far as running it goes."""

    async def open(self) -> None:
        """Make what is needed before the check runs."""

    async def aclose(self) -> None:
        """End everything, and look for what is left."""


R = TypeVar("R", bound=Opened)

# What a backend does at once on a quiet machine gets this long on a loaded one.
TIMEOUT_S = 5.0

CHECKS: tuple[Check, ...] = (
    *addresses.links.checks,
    *frames.links.checks,
    *order.links.checks,
    *memory.links.checks,
    *callbacks.links.checks,
    *flushing.links.checks,
    *pausing.links.checks,
    *pressure.links.checks,
    *closing.links.checks,
    *aborting.links.checks,
    *cancelling.links.checks,
    *isolation.links.checks,
    *leaks.links.checks,
    *threads.links.checks,
)
"""Every check, in the order they run."""


async def check_backend(
    backend: Backend | type[Backend] | str,
    *,
    address: Address | str | None = None,
    only: Collection[str] | None = None,
    timeout_s: float = TIMEOUT_S,
    raising: bool = True,
    first_only: bool = False,
    progress: Callable[[Result], None] | None = None,
) -> Report:
    """Hold a backend against the contract of :mod:`kvwire.backend`.

    Needs no test framework, and runs on whatever loop runs it.

    Args:
        backend: A class, which is made twice for each check, once for each side; or the
            scheme of an installed one; or an instance, which then plays both sides.
        address: To listen on, as often as a check wants: any free port or name. By
            default port 0 of the loopback address, or a free name for a backend within
            one process.
        only: Ids of the checks to run; by default all of :data:`CHECKS`.
        timeout_s: How long anything that a backend promises may take.
        raising: Whether a failed check raises in the end.
        first_only: Stop at the first check that fails.
        progress: Is told of each result as it comes.

    Raises:
        BackendUnavailable: No installed backend has that scheme.
        CheckFailed: A check failed, and ``raising`` is true.

    Cancel safety: safe, links of the check under way may stay open.
    """
    cls = registry.load(backend) if isinstance(backend, str) else backend
    make = (lambda: cls) if isinstance(cls, Backend) else cls
    if address is None:
        host = "" if cls.capabilities.same_process else "127.0.0.1"
        address = Address(cls.scheme, host)
    where = Address.parse(address)
    return await run_all(
        cls.scheme,
        chosen(CHECKS, only),
        lambda: Rig(make, where, timeout_s),
        raising=raising,
        first_only=first_only,
        progress=progress,
    )


async def run_check(
    check: Check,
    make: Callable[[], Backend],
    address: Address,
    timeout_s: float = TIMEOUT_S,
) -> Result:
    """Run one check, and look for what it leaves behind.

    Cancel safety: safe, links of the check may stay open.
    """
    return await run_on(lambda: Rig(make, address, timeout_s), check)


async def run_on(make_rig: Callable[[], R], check: CheckOf[R]) -> Result:
    """Run one check on a rig of its own, and look for what it leaves behind.

    Cancel safety: safe, what the check has opened may stay open.
    """
    began = time.perf_counter()
    reason = ""
    try:
        rig = make_rig()
        try:
            await rig.open()
            await check.run(rig)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the check failed
            reason = _reason_of(exc)
        try:
            await rig.aclose()
        except Exception as exc:  # noqa: BLE001 - likewise
            reason = reason or f"afterwards: {_reason_of(exc)}"
    except Exception as exc:  # noqa: BLE001 - the backend cannot even be made
        reason = _reason_of(exc)
    return Result(check=check, seconds=time.perf_counter() - began, reason=reason)


async def run_all(
    scheme: str,
    checks: Sequence[CheckOf[R]],
    make_rig: Callable[[], R],
    *,
    raising: bool,
    first_only: bool = False,
    progress: Callable[[Result], None] | None = None,
) -> Report:
    """Run checks one after the other, each on a rig of its own.

    Raises:
        CheckFailed: A check failed, and ``raising`` is true.

    Cancel safety: safe, what the check under way has opened may stay open.
    """
    results: list[Result] = []
    for check in checks:
        results.append(await run_on(make_rig, check))
        if progress is not None:
            progress(results[-1])
        if first_only and not results[-1].passed:
            break
    report = Report(backend=scheme, results=tuple(results))
    if raising:
        report.raise_for_failures()
    return report


def chosen(
    checks: Sequence[CheckOf[R]], only: Collection[str] | None, what: str = ""
) -> Sequence[CheckOf[R]]:
    """Those of the ids given, in the order they run; all if none are.

    Raises:
        UsageError: No check has one of the ids.
    """
    if only is None:
        return checks
    unknown = sorted(set(only) - {check.id for check in checks})
    if unknown:
        raise UsageError(f"conformance: no check{what} is called {', '.join(unknown)}")
    return [check for check in checks if check.id in only]


def _reason_of(error: Exception) -> str:
    """Why a check failed, in one line."""
    if isinstance(error, CheckFailed):
        return str(error)
    return f"{type(error).__name__}: {error}"
