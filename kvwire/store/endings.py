"""Waiting for ends that memory depends on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from kvwire.limits import STORE_GRACE_S

if TYPE_CHECKING:
    from kvwire import Connection, Incoming, Outgoing

T = TypeVar("T")


async def quiet(transfer: Incoming | Outgoing, connection: Connection) -> None:
    """Wait until nothing touches the memory of a transfer that is over.

    A link that keeps it for longer than a moment is stuck in the middle of a chunk.
    It is ended, which is what makes the memory free; a timeout alone never does.

    Cancel safety: safe, it may be called again.
    """
    try:
        async with asyncio.timeout(STORE_GRACE_S):
            await transfer.drained()
    except TimeoutError:
        connection.abort("it keeps the memory of a transfer that is over")
        await transfer.drained()


def said(error: BaseException) -> str:
    """What an error says; it lets go of the frames that it went through.

    An error of a connection is kept by each of its requests, and its frames keep what
    was to be moved: all the memory of a store.
    """
    text = str(error) or type(error).__name__
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__context__
    return text


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Run something to its end, whether its caller is cancelled meanwhile or not.

    Cancel safety: it is finished first; then the cancellation is raised.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        task.exception()  # seen: nobody is left to be told
        raise cancelled
    return task.result()
