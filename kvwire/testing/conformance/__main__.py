"""``python -m kvwire.testing.conformance tcp``: all checks of one backend, a table.

With ``--lanes`` its lanes are checked, and not its links.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import sys
from collections.abc import Callable
from typing import Final

import uvloop
from rich.console import Console
from rich.table import Table

from kvwire.errors import KVWireError
from kvwire.testing.conformance.lanes import LANE_CHECKS, check_lanes
from kvwire.testing.conformance.report import Report, Result
from kvwire.testing.conformance.runner import CHECKS, TIMEOUT_S, check_backend
from kvwire.types import Address

_LOOPS: Final[dict[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the checks and print what came of them; 0 if all passed."""
    chosen = _parser().parse_args(arguments)
    console = Console()
    known = [check.id for check in (LANE_CHECKS if chosen.lanes else CHECKS)]
    ids = fnmatch.filter(known, chosen.only)
    if not ids:
        console.print(f"no check matches {chosen.only!r}", style="red", markup=False)
        return 2
    try:
        with (
            asyncio.Runner(loop_factory=_LOOPS[chosen.loop]) as runner,
            console.status("") as status,
        ):

            def show(result: Result) -> None:
                status.update(result.check.id)

            report = runner.run(_checked(chosen, ids, show))
    except KVWireError as exc:
        console.print(str(exc), style="red", markup=False)
        return 2
    console.print(_table(report))
    console.print(report.summary, style="red" if report.failed else "green")
    return 1 if report.failed else 0


async def _checked(
    chosen: argparse.Namespace, ids: list[str], show: Callable[[Result], None]
) -> Report:
    if chosen.lanes:
        return await check_lanes(
            chosen.backend,
            settings=dict(chosen.setting),
            address=Address.parse(chosen.address) if chosen.address else None,
            only=ids,
            timeout_s=chosen.timeout,
            raising=False,
            progress=show,
        )
    return await check_backend(
        chosen.backend,
        address=chosen.address,
        only=ids,
        timeout_s=chosen.timeout,
        raising=False,
        progress=show,
    )


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvwire.testing.conformance",
        description="Hold a backend against the contract of kvwire.backend.",
    )
    parser.add_argument("backend", help="the scheme of an installed backend")
    parser.add_argument(
        "--address", help="any free port or name, such as tcp://[::1]:0"
    )
    parser.add_argument(
        "--lanes", action="store_true", help="check its lanes, against kvwire.lane"
    )
    parser.add_argument(
        "--setting",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the lanes, such as way=arena",
    )
    parser.add_argument("--loop", choices=_LOOPS, default="asyncio")
    parser.add_argument("--only", default="*", help="a pattern, such as 'close.*'")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, help="seconds for each promise"
    )
    return parser


def _table(report: Report) -> Table:
    table = Table("check", "promise", "result", box=None, pad_edge=False)
    for result in report:
        verdict = "[green]passed" if result.passed else "[red]FAILED"
        table.add_row(_plain(result.check.id), _plain(result.check.promise), verdict)
        if not result.passed:
            table.add_row("", f"[red]{_plain(result.reason)}", "")
    return table


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


if __name__ == "__main__":
    sys.exit(main())
