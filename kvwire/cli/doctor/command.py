"""The ``kvwire doctor`` command line."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console

import kvwire
from kvwire import Address, Config, Connection, UsageError
from kvwire.cli.doctor.attendant import PROFILE, attend
from kvwire.cli.doctor.examination import Examination, examine
from kvwire.cli.doctor.probe import try_out
from kvwire.cli.doctor.screen import COLUMNS_MAX, fitting, with_peer, written
from kvwire.cli.doctor.selftest import selftest
from kvwire.cli.doctor.trial import Report
from kvwire.limits import MIB

# What the configuration requires is missing, or a measurement has failed.
UNWELL: Final = 1
_PEER_FRAGMENT_BYTES: Final = (1 * MIB,)

app = App(name="doctor")


@app.default
def doctor(
    *,
    peer: str = "",
    listen: str = "",
    selftest: str = "",
    config: Path | None = None,
    pid: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    json: bool = False,
) -> int:
    """What can run here, what cannot and why, and what to do about it.

    The exit status is 1 if something is missing that the configuration asks for.

    Args:
        peer: Connect to this address, say which transport was chosen and why, and
            measure both directions (64 MiB each way, some times). The other side runs
            `kvwire doctor --listen`.
        listen: Let doctors of other hosts measure with this one, until Ctrl-C.
        selftest: Try every transport with the other host, which runs the same command
            with the same address; it is an address of one of the two. Both print the
            same report.
        config: A kvwire.toml; KVWIRE_* environment variables count in any case.
        pid: Look at this process instead: a running engine has limits, libraries and
            settings of its own.
        json: Print JSON instead.
    """
    if sum(map(bool, (peer, listen, selftest))) > 1:
        raise UsageError("--peer, --listen and --selftest: one at a time")
    wanted = Config.load(config)
    found = examine(wanted, pid)
    output = _Output(json)
    if listen:
        output.host(found)
        return asyncio.run(_listen(wanted, Address.parse(listen), found, output))
    if peer:
        done = asyncio.run(_ask_peer(wanted, Address.parse(peer), found))
        output.peer(done)
        return 0 if found.well and done.well else UNWELL
    if selftest:
        both = _both(wanted, Address.parse(selftest), found, output)
        report = asyncio.run(both)
        output.report(report)
        return 0 if report.well else UNWELL
    output.host(found)
    return 0 if found.well else UNWELL


class _Output:
    """The screen, or JSON: one document on a line of its own."""

    def __init__(self, json: bool) -> None:
        self._json = json
        self._console = Console(highlight=False, markup=False)
        self._console.width = min(self._console.width, COLUMNS_MAX)
        self._progress = Console(stderr=True, highlight=False, markup=False)

    def host(self, found: Examination) -> None:
        if self._json:
            self._document(found)
        else:
            self._console.print(fitting(found, self._console))

    def peer(self, report: Report) -> None:
        if self._json:
            self._document(report)
        else:
            self._console.print(with_peer(report))

    def report(self, report: Report) -> None:
        if self._json:
            self._document(report)
        else:
            self._console.print(written(report))

    def progress(self, line: str) -> None:
        self._progress.print(line)

    def _document(self, found: Examination | Report) -> None:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


def _communicator(config: Config) -> kvwire.open:
    return kvwire.open(config, profile={**config.profile, **PROFILE})


async def _listen(
    config: Config, address: Address, found: Examination, output: _Output
) -> int:
    def heard(connection: Connection, report: Report | None) -> None:
        output.progress(f"served {connection.peer} over {connection.transport}")
        if report is not None:
            output.report(report)

    async with _communicator(config) as communicator:
        bound = await communicator.listen(address)
        output.progress(f"listening on {bound}; Ctrl-C ends")
        await attend(communicator, found, heard)
    return 0


async def _ask_peer(config: Config, address: Address, found: Examination) -> Report:
    async with _communicator(config) as communicator:
        trial, there = await try_out(communicator, address, _PEER_FRAGMENT_BYTES)
    return Report(address=str(address), here=found, there=there, trials=(trial,))


async def _both(
    config: Config, address: Address, found: Examination, output: _Output
) -> Report:
    async with _communicator(config) as communicator:
        return await selftest(communicator, address, found, output.progress)
