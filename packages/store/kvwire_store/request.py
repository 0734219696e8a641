"""A store's put or get, from the call until its blocks are free."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from kvwire.aio import LoopThread
from kvwire.kv.outcome import Outcome
from kvwire.types import Uncopied
from kvwire_store.operations.asked import AskedGet
from kvwire_store.operations.base import Operation


class Settled(asyncio.Future[Any]):
    """The outcome of a call without a task; its waiters continue in the next turn.

    Each await has a future of its own, so that cancelling an await ends no other.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._waiters: list[asyncio.Future[Outcome]] = []

    def waiter(self) -> asyncio.Future[Outcome]:
        """Return a future that gets the outcome."""
        if self.done():
            return self
        made: asyncio.Future[Outcome] = self.get_loop().create_future()
        if self._waiters:
            self._waiters = [one for one in self._waiters if not one.done()]
        self._waiters.append(made)  # bounded: one for each await, and a cancelled one
        return made

    def settle(self, outcome: object) -> None:
        """Set the outcome."""
        self.set_result(outcome)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Set the error of the call."""
        self.set_exception(error)
        self._wake()

    def follow(self, task: asyncio.Task[Any]) -> None:
        """Set the outcome of a task, once it has ended."""
        task.add_done_callback(self._end_with)

    def _end_with(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.cancel()
            self._wake()
        elif isinstance(error := task.exception(), Exception):
            self.fail(error)
        else:
            self.settle(task.result())

    def _wake(self) -> None:
        waiters = self._waiters
        self._waiters = []
        for waiter in waiters:
            if waiter.done():
                continue
            if self.cancelled():
                waiter.cancel()
            elif (error := self.exception()) is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(self.result())


class StoreRequest(Uncopied):
    """A running put or get. Await it for its :class:`~kvwire.Outcome`.

    It starts with the call, whether it is awaited or not. Cancelling an await stops the
    waiting, not the copy; it can be awaited again. The caller's blocks must not be
    reused before :meth:`drained` has returned.
    """

    def __init__(
        self,
        work: Operation | AskedGet,
        task: asyncio.Future[Outcome],
        thread: LoopThread,
    ) -> None:
        self._thread = thread
        self._work = work
        self._task = task

    def __repr__(self) -> str:
        state = "over" if self.done() else "under way"
        return f"<StoreRequest, {self._work.verb}, {state}>"

    def __await__(self) -> Generator[Any, Any, Outcome]:
        self._thread.check("await StoreRequest")
        # Keep our frames out of an error's traceback: they refer to this request, which
        # refers to the error, and the cycle would keep the blocks' images alive.
        task = self._task
        if task.done() and not task.cancelled() and task.exception() is None:
            return _returned(task.result())
        if isinstance(task, Settled):
            return task.waiter().__await__()
        return asyncio.shield(task).__await__()

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return self._task.done()

    @property
    def outcome(self) -> Outcome | None:
        """The outcome; None until it is known."""
        ended = self._task.done() and not self._task.cancelled()
        return self._task.result() if ended else None

    @property
    def is_drained(self) -> bool:
        """Whether nothing in the store can touch the blocks any more."""
        return self._work.drained.is_set()

    async def drained(self) -> None:
        """Wait until nothing in the store can touch the caller's blocks any more.

        A get drains when its outcome is known. A put drains earlier: it copies its
        blocks to the memory tier before it completes, and lower tiers read them from
        there.

        Cancel safety: safe, it only watches.
        """
        self._thread.check("StoreRequest.drained")
        await self._work.drained.wait()


def _returned(outcome: Outcome) -> Generator[Any, Any, Outcome]:
    """Await nothing, and return an outcome."""
    yield from ()
    return outcome
