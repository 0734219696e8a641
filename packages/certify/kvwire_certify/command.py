"""``kvwire certify``: check the memory safety of any transport, from outside."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine, Iterable
from contextlib import AbstractContextManager
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Final, Self

import msgspec
from cyclopts import App, Parameter
from cyclopts.types import PositiveFloat, PositiveInt
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

from kvwire import UsageError
from kvwire.cli.console import console, show
from kvwire.extras import needed_by
from kvwire_certify import report
from kvwire_certify.conformance.check import show_end
from kvwire_certify.player import Played
from kvwire_certify.runner import (
    LIMIT_S,
    Breach,
    Certificate,
    certify,
    play_again,
)
from kvwire_certify.transport import TARGETS

BROKEN: Final = 1

app: App = App(name="certify")
app.command(
    "kvwire_certify.conformance.command:backend",
    name="backend",
    help="Check a backend of kvwire against the contract of kvwire.backend.",
)


@app.command
def tier(address: str, /) -> int:
    """Check a tier of the block store against its ten promises.

    The exit status is 1 if a check failed.

    Args:
        address: Its address, such as "disk:/tmp/blocks?size=64MiB".
    """
    # The store is a package of its own.
    with needed_by("certify tier", extra="tiers", distribution="kvwire-certify"):
        from kvwire_certify.tiers import check_tier  # noqa: PLC0415
    return show_end(asyncio.run(check_tier(address, raising=False, progress=print)))


@app.default
def command(  # noqa: PLR0913 - each is an option of the command
    target: str = "",
    /,
    *,
    schedules: PositiveInt = 200,
    seed: int = 1,
    seconds: PositiveFloat | None = None,
    limit_s: Annotated[PositiveFloat, Parameter(name="--limit")] = LIMIT_S,
    times: PositiveInt = 3,
    without: list[str] | None = None,
    into: Path = Path(),
    junit: Path | None = None,
    json: bool = False,
) -> int:
    """Cancel, time out, kill and reconnect a transport, and check every byte.

    The exit status is 1 if a promise was broken. The smallest schedule that breaks it
    is written to a file, which runs again: kvwire certify FILE.json. Ctrl-C ends the
    run after the current schedule, with a report.

    Args:
        target: A transport that comes with kvwire, such as toy; an adapter of yours, as
            file.py:Class or module:Class; or the file of a saved schedule. Without it,
            the command lists the transports that come with kvwire, and what each of
            them lacks here.
        schedules: How many schedules to play.
        seed: The seed of the first schedule; each further schedule adds 1.
        seconds: Start no schedule after this many seconds. Shrinking the schedules that
            failed comes on top.
        limit_s: The time limit of each call, in seconds. A call that exceeds it counts
            as hung only if it also exceeds six times this limit when its schedule runs
            again.
        times: How often to play the smallest schedule of each breach again.
        without: A rule that the transport need not keep; may be repeated. For example
            --without stale for a transport whose references never expire.
        into: The folder in which failing schedules are saved.
        junit: Also write the report to this file, as JUnit XML with one test case for
            each promise.
        json: Print JSON instead.
    """
    if not target:
        _list()
        return 0
    for folder in (into, *([junit.parent] if junit else ())):
        folder.mkdir(parents=True, exist_ok=True)
    with _Progress(target) as progress:
        if target.endswith(".json"):
            breach = _read(Path(target))
            work = play_again(breach, times=times, limit_s=limit_s)
            with _named(breach.target):
                found = asyncio.run(work)
        else:
            work = certify(
                target,
                seeds=takewhile(progress.goes_on, range(seed, seed + schedules)),
                seconds=seconds,
                limit_s=limit_s,
                times=times,
                without=without or (),
                progress=progress,
            )
            with _named(target):
                found = asyncio.run(progress.until_interrupt(work))
    # First what cannot be made again from the rest: the report may fail.
    saved = [] if target.endswith(".json") else _save(found.breaches, into)
    try:
        _show(found, json=json)
        if junit is not None:
            junit.write_bytes(report.junit(found))
    finally:
        for path in saved:
            print(f"run it again: kvwire certify {path}", file=sys.stderr)
    if found.breaches:
        return BROKEN
    if progress.interrupted:
        raise KeyboardInterrupt
    return 0


class _Progress:
    """Prints each breach and, on a terminal, the number of schedules so far.

    Args:
        target: The target, for the text.
    """

    def __init__(self, target: str) -> None:
        self.interrupted = False
        self._count = 0
        self._target = target
        # A text, since Status reads strings as markup.
        text = Text(f"{target}: starting")
        self._status = Status(text, console=console(stderr=True))

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, seed: int, played: Played) -> None:
        """Count a schedule; print its breach."""
        self._count += 1
        self._status.update(Text(f"{self._target}: {self._count} schedules"))
        if played.rule:
            text = f"seed {seed}: {played.rule}: {played.text}"
            self._status.console.print(text, soft_wrap=True)

    def goes_on(self, _: int) -> bool:
        """Return whether another schedule may start."""
        return not self.interrupted

    async def until_interrupt(
        self, work: Coroutine[Any, Any, Certificate]
    ) -> Certificate:
        """Run schedules; after Ctrl-C, none starts any more.

        Cancel safety: safe if that of ``work`` is.
        """
        loop = asyncio.get_running_loop()
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGINT, self._interrupt, loop)
        try:
            return await work
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def _interrupt(self, loop: asyncio.AbstractEventLoop) -> None:
        self.interrupted = True
        loop.remove_signal_handler(signal.SIGINT)
        self._status.console.print(
            "This schedule is the last one, and breaches are shortened. Press Ctrl-C "
            "again to end at once, without a report.",
            soft_wrap=True,
        )


def _save(breaches: Iterable[Breach], into: Path) -> list[Path]:
    """Write each breach to a file, which runs again; return the files."""
    paths = []
    for breach in breaches:
        path = into / report.file_name(breach)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(breach)) + b"\n")
        paths.append(path)
    return paths


def _show(found: Certificate, *, json: bool) -> None:
    if json:
        document = msgspec.json.format(msgspec.json.encode(found))
        sys.stdout.buffer.write(document + b"\n")
    else:
        show(report.page(found), console())


def _read(path: Path) -> Breach:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Breach)
    except msgspec.MsgspecError as exc:
        raise UsageError(f"certify: {path} is not a saved schedule: {exc}") from None


def _named(target: str) -> AbstractContextManager[None]:
    """Turn a missing package of a target into an error with its install command."""
    name = target.partition(":")[0]
    if needs := TARGETS.get(name):
        return needed_by(f"certify {name}", command=needs.install)
    return contextlib.nullcontext()


def _list() -> None:
    """List the targets, and look up their libraries without importing them."""
    needed = Column("what it needs", overflow="fold")  # paths are whole
    table = Table("target", needed, box=None, pad_edge=False)
    for target, needs in TARGETS.items():
        try:
            text = ", ".join(needs.found()) or "nothing more"
        except ModuleNotFoundError as exc:
            text = f"{exc}: {needs.install}"
        table.add_row(target, text)
    show(table, console())
