"""``kvwire directory``: list the members of a directory, and watch their changes."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from kvwire import Config
from kvwire.directory import Directory, Record, open_directory
from kvwire.errors import without_password

app: App = App(name="directory")

_OWN: Final = "file:"
_COLUMNS: Final = ("name", "role", "address", "load", "incarnation", "model", "labels")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DirectoryOptions:
    """Options that choose a directory.

    Attributes:
        directory: The directory, such as redis://host:6379. By default the
            configuration's directory, or else this user's folder on this host, file:
        config: A kvwire.toml; KVWIRE_* environment variables also apply.
    """

    directory: str = ""
    config: Path | None = None

    @property
    def url(self) -> str:
        """The directory's URL."""
        return self.directory or Config.load(self.config).directory or _OWN


_WHERE: Final = DirectoryOptions()


@app.command
def ls(
    selector: str = "",
    /,
    *,
    where: DirectoryOptions = _WHERE,
    json: bool = False,
) -> None:
    """List the current members.

    Args:
        selector: The members to show, such as role=decode,model=demo; all by default.
        where: The directory.
        json: Print a JSON list instead.
    """
    url = where.url
    directory = open_directory(url)
    members = asyncio.run(_members(directory, selector))
    if json:
        _print_json(members)
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
    if directory.ignored:
        print(f"{directory.ignored} entries are not valid records", file=sys.stderr)


@app.command
def watch(
    selector: str = "",
    /,
    *,
    where: DirectoryOptions = _WHERE,
    json: bool = False,
) -> None:
    """Print a line for each change of a member, until Ctrl-C.

    Args:
        selector: The members to show, such as role=decode,model=demo; all by default.
        where: The directory.
        json: Print each change as a line of JSON instead.
    """
    asyncio.run(_watch(open_directory(where.url), selector, json))


async def _members(directory: Directory, selector: str) -> list[Record]:
    try:
        found = await directory.members(selector)
    finally:
        await directory.close()
    return sorted(found, key=lambda record: (record.role, record.name, record.key))


async def _watch(directory: Directory, selector: str, json: bool) -> None:
    try:
        async with aclosing(directory.watch(selector)) as changes:
            async for change in changes:
                if json:
                    _print_json({"change": change.kind, "record": change.record}, 0)
                else:
                    cells = (cell for cell in _cells(change.record) if cell)
                    print(f"{change.kind:<8}", *cells, flush=True)
    finally:
        await directory.close()


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


def _print_json(document: Any, indent: int = 2) -> None:
    encoded = msgspec.json.encode(document)
    sys.stdout.buffer.write(msgspec.json.format(encoded) if indent else encoded)
    sys.stdout.buffer.write(b"\n")
    sys.stdout.flush()
