"""A put or a get of a store, from the call until nothing touches the blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from kvwire.aio import LoopThread
from kvwire.kv.outcome import Outcome
from kvwire.store.operations.base import Operation


class StoreRequest:
    """Follows a put or get. Await it for its :class:`~kvwire.Outcome`.

    It runs from the call on, whether somebody awaits it or not. Cancelling an await of
    it stops the waiting and not the copy; it can be awaited again. The caller's blocks
    may be used for something else from :meth:`drained` on, and not before.
    """

    def __init__(
        self, work: Operation, task: asyncio.Task[Outcome], thread: LoopThread
    ) -> None:
        self._thread = thread
        self._work = work
        self._task = task

    def __repr__(self) -> str:
        state = "over" if self.done() else "under way"
        return f"<StoreRequest, {type(self._work).__name__.lower()}, {state}>"

    def __await__(self) -> Generator[Any, Any, Outcome]:
        self._thread.check("await StoreRequest")
        return asyncio.shield(self._task).__await__()

    def done(self) -> bool:
        """Tell whether the outcome is known."""
        return self._task.done()

    @property
    def outcome(self) -> Outcome | None:
        """Return the outcome, once it is known."""
        ended = self._task.done() and not self._task.cancelled()
        return self._task.result() if ended else None

    @property
    def is_drained(self) -> bool:
        """Tell whether nothing of the store can touch the blocks any more."""
        return self._work.drained.is_set()

    async def drained(self) -> None:
        """Wait until nothing of the store can touch the caller's blocks any more.

        Of a get that is when its outcome is known. A put has copied its blocks before
        it is complete, since a tier below memory takes them from there.

        Cancel safety: safe, it only watches.
        """
        self._thread.check("StoreRequest.drained")
        await self._work.drained.wait()
