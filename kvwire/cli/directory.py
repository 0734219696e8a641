"""``kvwire directory ls``: the members of a directory."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Final

import msgspec
from cyclopts import App
from rich.console import Console
from rich.table import Table

from kvwire import Config
from kvwire.directory import Directory, Record, open_directory
from kvwire.errors import without_password

app: App = App(name="directory")

_OWN: Final = "file:"
_COLUMNS: Final = ("name", "role", "address", "load", "incarnation", "model", "labels")


@app.command
def ls(
    selector: str = "",
    /,
    *,
    directory: str = "",
    config: Path | None = None,
    json: bool = False,
) -> None:
    """List the current members.

    Args:
        selector: The members to show, such as role=decode,model=demo; all by default.
        directory: The directory, such as redis://host:6379. By default the
            configuration's directory, or else this user's folder on this host, file:
        config: A kvwire.toml; KVWIRE_* environment variables also apply.
        json: Print a JSON list instead.
    """
    url = directory or Config.load(config).directory or _OWN
    opened = open_directory(url)
    members = asyncio.run(_members(opened, selector))
    if json:
        encoded = msgspec.json.format(msgspec.json.encode(members))
        sys.stdout.buffer.write(encoded + b"\n")
        return
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for record in members:
        table.add_row(*_cells(record))
    if members:
        # Never cut off at the screen's width: scripts read it, and addresses must be
        # whole.
        Console(width=max(80, _width(members)), highlight=False, markup=False).print(
            table
        )
    else:
        which = f"matches {selector}" if selector else "is"
        shown = without_password(url)
        if url == _OWN:
            shown = f"{_OWN} (your own folder on this host; --directory names another)"
        print(f"no member {which} in {shown}", file=sys.stderr)
    if opened.ignored:
        print(f"{opened.ignored} entries are not valid records", file=sys.stderr)


async def _members(directory: Directory, selector: str) -> list[Record]:
    try:
        found = await directory.members(selector)
    finally:
        await directory.close()
    return sorted(found, key=lambda record: (record.role, record.name, record.key))


def _cells(record: Record) -> tuple[str, ...]:
    labels = ",".join(f"{key}={value}" for key, value in sorted(record.labels.items()))
    load = f"{record.load:.2f}"
    return (
        record.name,
        record.role,
        record.address,
        load,
        record.incarnation[:8],
        record.model,
        labels,
    )


def _width(members: list[Record]) -> int:
    rows = [_COLUMNS, *map(_cells, members)]
    return sum(max(map(len, column)) + 1 for column in zip(*rows, strict=True))
