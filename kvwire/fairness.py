"""An operation that fails at once lets the loop run before it raises.

Programs try again in a loop: ``while True: try: await connection.recv(tag) except
RequestError: continue``. An ``await`` that fails without suspending its task would keep
such a loop running and nothing else, no timer and no other connection, for as long as
the reason lasts. So every awaitable of the public API that can fail gives the event
loop one turn before it raises.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def yields_before_raising(
    function: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a coroutine function: it raises after one turn of the event loop."""

    @functools.wraps(function)
    async def run(*args: P.args, **keywords: P.kwargs) -> T:
        try:
            return await function(*args, **keywords)
        except Exception:
            await asyncio.sleep(0)
            raise

    return run
