"""The ``kvwire doctor`` command line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console, RenderableType

import kvwire
from kvwire import Address, Config, Connection, UsageError
from kvwire.cli.doctor.examination import Examination, examine
from kvwire.cli.doctor.peer import PROFILE, PeerReport, attend, examine_peer
from kvwire.cli.doctor.screen import COLUMNS_MAX, fitting, written

# What the configuration requires is missing, or a measurement has failed.
UNWELL: Final = 1

app: App = App(name="doctor")


@app.default
def doctor(
    *,
    peer: str = "",
    listen: str = "",
    config: Path | None = None,
    pid: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    json: bool = False,
) -> int:
    """What can run here, what cannot and why, and what to do about it.

    The exit status is 1 if something is missing that the configuration asks for.

    Args:
        peer: Connect to this address, say which transport was chosen and why, and
            measure every transport that both sides can use. The other side runs
            `kvwire doctor --listen` and prints the same report.
        listen: Let doctors of other hosts measure with this one, until Ctrl-C.
        config: A kvwire.toml; KVWIRE_* environment variables count in any case.
        pid: Look at this process instead: a running engine has limits, libraries and
            settings of its own.
        json: Print JSON instead.
    """
    if peer and listen:
        raise UsageError("--peer and --listen: one at a time")
    wanted = Config.load(config)
    found = examine(wanted, pid)
    output = _Output(json)
    if peer:
        done = asyncio.run(_ask_peer(wanted, Address.parse(peer), found, output))
        output.report(done)
        return 0 if found.well and done.well else UNWELL
    output.host(found)
    if listen:
        asyncio.run(_listen(wanted, Address.parse(listen), found, output))
    return 0 if found.well else UNWELL


class _Output:
    """The screen, or JSON: one document on a line of its own."""

    def __init__(self, json: bool) -> None:
        self._json = json
        self._console = Console(highlight=False, markup=False)
        self._console.width = min(self._console.width, COLUMNS_MAX)
        self._progress = Console(stderr=True, highlight=False, markup=False)

    def host(self, found: Examination) -> None:
        self._show(found, lambda: fitting(found, self._console))

    def report(self, report: PeerReport) -> None:
        self._show(report, lambda: written(report))

    def progress(self, line: str) -> None:
        self._progress.print(line)

    def _show(
        self, found: Examination | PeerReport, shown: Callable[[], RenderableType]
    ) -> None:
        if self._json:
            document = msgspec.json.format(msgspec.json.encode(found))
            sys.stdout.buffer.write(document + b"\n")
        else:
            self._console.print(shown())


def _communicator(config: Config) -> kvwire.open:
    return kvwire.open(config, profile={**config.profile, **PROFILE})


async def _listen(
    config: Config, address: Address, found: Examination, output: _Output
) -> None:
    def heard(connection: Connection, report: PeerReport | None) -> None:
        output.progress(f"served {connection.peer} over {connection.transport}")
        if report is not None:
            output.report(report)

    async with _communicator(config) as communicator:
        bound = await communicator.listen(address)
        output.progress(f"listening on {bound}; Ctrl-C ends")
        await attend(communicator, found, heard)


async def _ask_peer(
    config: Config, address: Address, found: Examination, output: _Output
) -> PeerReport:
    async with _communicator(config) as communicator:
        return await examine_peer(communicator, address, found, output.progress)
