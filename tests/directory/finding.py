"""A peer that is found by a directory which others keep."""

from __future__ import annotations

import pytest

import kvwire
from kvwire import UsageError


async def found_by(where: str) -> tuple[str, str]:
    """Connect by a directory that takes no announcements.

    Args:
        where: With ``{port}`` where the port of the peer belongs.

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
