"""``kvwire config show``: every configured value, and its source."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from cyclopts import App
from rich.console import Console
from rich.table import Table

from kvwire.backend.selection import check_transports
from kvwire.config import load_with_origins
from kvwire.directory.registry import open_directory
from kvwire.errors import without_password

app: App = App(name="config")


@app.command
def show(*, config: Path | None = None, json: bool = False) -> None:
    """Print every value of the configuration, and where it came from.

    If kvwire would refuse a key, a value or a name, this command fails with the same
    error.

    Args:
        config: A kvwire.toml; KVWIRE_* environment variables also apply.
        json: Print JSON instead.
    """
    found, origins = load_with_origins(config)
    check_transports(found)
    if found.directory:
        open_directory(found.directory)
    rows = {
        key: (value, origins.get(key, "default"))
        for key, value in msgspec.structs.asdict(found).items()
    }
    rows["directory"] = (without_password(found.directory), rows["directory"][1])
    if json:
        document = {k: {"value": v, "from": origin} for k, (v, origin) in rows.items()}
        encoded = msgspec.json.format(msgspec.json.encode(document))
        sys.stdout.buffer.write(encoded + b"\n")
        return
    console = Console(soft_wrap=True, highlight=False, markup=False)
    table = Table("key", "value", "from", box=None, pad_edge=False)
    for key, (value, origin) in rows.items():
        shown = msgspec.json.encode(value).decode()
        table.add_row(key, shown, origin)
    console.print(table)
