"""``python -m kvwire_certify.conformance tcp``: all checks of one backend.

It prints one line for each check as the check ends, and repeats the failures at the
end. With ``--lanes`` it checks the backend's lanes instead of its links.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import uvloop

from kvwire.errors import KVWireError
from kvwire.types import Address
from kvwire_certify.conformance.check import Report, Result
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


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and print their results; return 0 if all passed."""
    chosen = _parser().parse_args(arguments)

    known = [check.id for check in (LANE_CHECKS if chosen.lanes else CHECKS)]
    ids = fnmatch.filter(known, chosen.only)
    if not ids:
        print(f"no check matches {chosen.only!r}", file=sys.stderr)
        return 2
    try:
        with asyncio.Runner(loop_factory=_LOOPS[chosen.loop]) as runner:
            report = runner.run(_checked(chosen, ids))
    except KVWireError as exc:
        print(exc, file=sys.stderr)
        return 2
    if report.failed:
        print(f"\n{len(report.failed)} failed:\n{report.failures}\n")
    print(report.summary)
    return 1 if report.failed else 0


async def _checked(chosen: argparse.Namespace, ids: list[str]) -> Report:
    check: Any = check_backend
    if chosen.lanes:
        check = functools.partial(check_lanes, settings=dict(chosen.setting))
    report: Report = await check(
        chosen.backend,
        address=Address.parse(chosen.address) if chosen.address else None,
        only=ids,
        timeout_s=chosen.timeout,
        raising=False,
        first_only=chosen.first_only,
        progress=_show,
    )
    return report


def _show(result: Result) -> None:
    print(result, flush=True)


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvwire_certify.conformance",
        description="Check a backend against the contract of kvwire.backend.",
    )
    add = parser.add_argument
    add("backend", help="the scheme of an installed backend")
    add("--address", help="any free port or name, such as tcp://[::1]:0")
    add(
        "--lanes",
        action="store_true",
        help="check its lanes, against kvwire.backend.lane",
    )
    add(
        "--setting",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the lanes, such as way=arena",
    )
    add("--loop", choices=_LOOPS, default="asyncio")
    add("--only", default="*", help="a pattern, such as 'close.*'")
    add(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        help="time limit of each promise, in seconds",
    )
    add(
        "-x",
        "--first-only",
        action="store_true",
        help="stop at the first check that fails",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
