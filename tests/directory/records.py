"""Records of members for tests."""

from __future__ import annotations

import tempfile
from contextlib import aclosing
from typing import Any

from kvwire.directory import ChangeKind, Record
from kvwire.directory.file import FileDirectory


def record(number: int = 1, **fields: Any) -> Record:
    """The record of a member, told from others by its number."""
    fields = {
        "name": f"n{number}",
        "address": f"tcp://127.0.0.1:{7000 + number}",
        "incarnation": f"{number:032x}",
        **fields,
    }
    return Record(**fields)


async def a_lease_has_ended(lease_s: float) -> None:
    """Return when a member has left that was heard of once, when this began."""
    with tempfile.TemporaryDirectory() as folder:
        directory, member = FileDirectory(f"file:{folder}"), record(lease_s=lease_s)
        await directory.write(member.key, member.encode(), lease_s)
        async with aclosing(directory.watch()) as changes:
            async for change in changes:
                if change.kind is ChangeKind.LEFT:
                    return
