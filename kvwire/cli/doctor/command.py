"""The ``kvwire doctor`` command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number

from kvwire import Config
from kvwire.cli.console import console, show
from kvwire.cli.doctor.checks import HostFiles
from kvwire.cli.doctor.examination import examine
from kvwire.cli.doctor.screen import COLUMNS_MAX, fitting

# The status if a requirement is missing.
UNWELL: Final = 1

app: App = App(name="doctor")


@app.default
def doctor(
    *,
    config: Path | None = None,
    pid: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    json: bool = False,
) -> int:
    """Show the transports that can run here, and the remedies for the others.

    The exit status is 1 if something that the configuration requires is missing.

    Args:
        config: A kvwire.toml; KVWIRE_* environment variables also apply.
        pid: Check this running process instead of the current one: its limits,
            libraries and settings.
        json: Print JSON instead.
    """
    found = examine(Config.load(config), HostFiles(pid=pid))
    if json:
        document = msgspec.json.format(msgspec.json.encode(found))
        sys.stdout.buffer.write(document + b"\n")
    else:
        screen = console()
        if screen.is_terminal:
            screen.width = min(screen.width, COLUMNS_MAX)
        show(fitting(found, screen), screen)
    return 0 if found.well else UNWELL
