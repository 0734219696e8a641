"""Cancel scopes of anyio, which Starlette and FastAPI run their handlers in.

asyncio cancels a task once. Such a scope cancels it at each ``await`` until it is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio


async def in_scope(turns: int, use: Callable[[], Awaitable[object]]) -> bool:
    """Use something in a scope that is cancelled after so many turns of the loop.

    Returns:
        Whether it was cancelled before the use was over.
    """
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:

        def turn(left: int) -> None:
            if left:
                loop.call_soon(turn, left - 1)
            else:
                scope.cancel()

        turn(turns)
        await use()
        return False
    return True
