"""Waiting for ends that memory depends on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from kvwire.clock import start_task
from kvwire.limits import STORE_GRACE_S

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


def error_text(error: BaseException) -> str:
    """Return an error's text; drop the frames that it went through.

    An error of a connection is kept by each of its requests, and its frames keep what
    was to be moved: all the memory of a store.
    """
    text = str(error) or type(error).__name__
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__context__
    return text


async def gather_all(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Run several things at once, and return what each of them returns.

    If one raises, the others go on to their ends before the first error is raised: so
    nothing goes on unowned, and nothing that touches memory is stopped in the middle.

    Cancel safety: each is cancelled, and raised is when all have ended.
    """
    ended = await asyncio.gather(*map(start_task, works), return_exceptions=True)
    errors = [one for one in ended if isinstance(one, BaseException)]
    try:
        if errors:
            raise errors[0]
        return [one for one in ended if not isinstance(one, BaseException)]
    finally:
        # An error holds this frame, and with it itself, in a cycle.
        ended.clear()
        errors.clear()
