"""The ``kvwire doctor`` command line."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number

import kvwire
from kvwire import Address, Config, UsageError
from kvwire.cli.console import console, show
from kvwire.cli.doctor.checks import HostFiles
from kvwire.cli.doctor.examination import Examination, examine
from kvwire.cli.doctor.peer import PROFILE, PeerReport, examine_peer
from kvwire.cli.doctor.peer import listen as listen_to_peers
from kvwire.cli.doctor.screen import COLUMNS_MAX, fitting, written

# The status if a requirement is missing, or a measurement has failed.
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
    """Show the transports that can run here, and the remedies for the others.

    The exit status is 1 if something that the configuration requires is missing.

    Args:
        peer: Connect to this address, show the chosen transport and the reason, and
            measure every transport that both sides can use. The other side runs `kvwire
            doctor --listen` and prints the same report.
        listen: Wait for `kvwire doctor --peer` on other hosts and measure with it,
            until Ctrl-C.
        config: A kvwire.toml; KVWIRE_* environment variables also apply.
        pid: Check this running process instead of the current one: its limits,
            libraries and settings.
        json: Print JSON instead.
    """
    if peer and listen:
        raise UsageError("--peer and --listen: pass one of them")
    wanted = Config.load(config)
    address = Address.parse(peer or listen) if peer or listen else None
    found = examine(wanted, HostFiles(pid=pid))
    if peer and address:
        done = asyncio.run(_ask_peer(wanted, address, found))
        _show(done, json)
        return 0 if found.well and done.well else UNWELL
    _show(found, json)
    if address:
        asyncio.run(_listen(wanted, address, found, json))
    return 0 if found.well else UNWELL


def _show(found: Examination | PeerReport, json: bool) -> None:
    """Print a screen or a report, or JSON: one document per line."""
    if json:
        document = msgspec.json.format(msgspec.json.encode(found))
        sys.stdout.buffer.write(document + b"\n")
        return
    screen = console()
    if screen.is_terminal:
        screen.width = min(screen.width, COLUMNS_MAX)
    if isinstance(found, PeerReport):
        show(written(found), screen)
    else:
        show(fitting(found, screen), screen)


def _progress(line: str) -> None:
    console(stderr=True).print(f"trying: {line}")


async def _listen(
    config: Config, address: Address, found: Examination, json: bool
) -> None:
    profile = {**config.profile, **PROFILE}
    async with kvwire.open(config, profile=profile) as communicator:
        where = await communicator.listen(address)
        console(stderr=True).print(f"listening on {where}; Ctrl-C ends")
        await listen_to_peers(communicator, found, lambda given: _show(given, json))


async def _ask_peer(config: Config, address: Address, found: Examination) -> PeerReport:
    profile = {**config.profile, **PROFILE}
    async with kvwire.open(config, profile=profile) as communicator:
        return await examine_peer(communicator, address, found, _progress)
