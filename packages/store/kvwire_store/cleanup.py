"""Ends a request, and waits until its memory is free."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from kvwire_store.limits import STORE_GRACE_S

if TYPE_CHECKING:
    from kvwire import Connection, Request

T = TypeVar("T")


async def drain_or_abort(request: Request[int], connection: Connection) -> None:
    """Cancel a request, and wait until nothing touches its memory.

    If its link still holds the memory after a moment, the link is stuck in the middle
    of a chunk. Then the connection is aborted, which frees the memory; a timeout alone
    never does.

    Cancel safety: safe, it may be called again.
    """
    request.cancel()
    why = "it holds the memory of a request that has ended"
    stuck = asyncio.get_running_loop().call_later(STORE_GRACE_S, connection.abort, why)
    try:
        await request.released()
    finally:
        stuck.cancel()
