"""``kvwire certify backend``: the conformance kit from a shell."""

from __future__ import annotations

import asyncio
import fnmatch
import functools
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import uvloop
from cyclopts import Parameter

from kvwire.errors import UsageError
from kvwire.types import Address
from kvwire_certify.conformance.check import show_end
from kvwire_certify.conformance.runner import (
    CHECKS,
    LANE_CHECKS,
    TIMEOUT_S,
    check_backend,
    check_lanes,
)

_LOOPS: Final[dict[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}


def backend(
    scheme: str,
    /,
    *,
    lanes: bool = False,
    setting: list[str] | None = None,
    address: str = "",
    only: str = "*",
    loop: Literal["asyncio", "uvloop"] = "asyncio",
    timeout_s: Annotated[float, Parameter(name="--timeout")] = TIMEOUT_S,
    first_only: Annotated[bool, Parameter(name=["--first-only", "-x"])] = False,
) -> int:
    """Check a backend against the contract of kvwire.backend.

    One line is printed for each check as it ends; failures are repeated at the end. The
    exit status is 1 if a check failed.

    Args:
        scheme: The scheme of an installed backend.
        lanes: Check its lanes instead of its links.
        setting: A setting of the lanes, as NAME=VALUE; may be repeated.
        address: Any free port or name to listen on, such as tcp://[::1]:0.
        only: The checks to run: a pattern, such as 'close.*'.
        loop: The event loop.
        timeout_s: The time limit of each promise, in seconds.
        first_only: Stop at the first check that fails.
    """
    known = [check.id for check in (LANE_CHECKS if lanes else CHECKS)]
    ids = fnmatch.filter(known, only)
    if not ids:
        raise UsageError(f"conformance: no check matches {only!r}")
    check: Any = check_backend
    if lanes:
        pairs = dict(text.partition("=")[::2] for text in setting or ())
        check = functools.partial(check_lanes, settings=pairs)
    work = check(
        scheme,
        address=Address.parse(address) if address else None,
        only=ids,
        timeout_s=timeout_s,
        raising=False,
        first_only=first_only,
        progress=functools.partial(print, flush=True),
    )
    with asyncio.Runner(loop_factory=_LOOPS[loop]) as runner:
        return show_end(runner.run(work))
