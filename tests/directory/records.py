"""Records of members for tests, and a peer that is found by a directory."""

from __future__ import annotations

import tempfile
from contextlib import aclosing
from typing import Any

import pytest

import kvwire
from kvwire import UsageError
from kvwire.directory import ChangeKind, Record
from kvwire.directory.file import FileDirectory


def record(number: int = 1, **fields: Any) -> Record:
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


async def found_by(where: str) -> tuple[str, str]:
    """Connect by a directory that takes no announcements.

    Returns:
        The name of the peer, and why nothing is announced.
    """
    async with kvwire.open(name="far") as far:
        where = where.format(port=(await far.listen("127.0.0.1:0")).port)
        async with kvwire.open(directory=where) as near:
            found = await near.peer("role=decode").connect()
            with pytest.raises(UsageError) as refused:
                near.announce(address="127.0.0.1:1")
            return found.peer.name, str(refused.value)
