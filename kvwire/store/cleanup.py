"""Waiting for ends that memory depends on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from kvwire.store.limits import STORE_GRACE_S

if TYPE_CHECKING:
    from kvwire import Connection, Request

T = TypeVar("T")


async def drain_or_abort(request: Request[int], connection: Connection) -> None:
    """End a request, and wait until nothing touches its memory.

    A link that keeps it for longer than a moment is stuck in the middle of a chunk.
    It is ended, which is what makes the memory free; a timeout alone never does.

    Cancel safety: safe, it may be called again.
    """
    request.cancel()
    why = "it keeps the memory of a request that is over"
    stuck = asyncio.get_running_loop().call_later(STORE_GRACE_S, connection.abort, why)
    try:
        await request.released()
    finally:
        stuck.cancel()
