"""A request as its owner sees it: one movement of bytes, with exactly one completion.

Cancelling an ``await`` stops the waiting and not the movement: the hardware goes on,
and so does the request. ``cancel()`` ends the request, and ``released()`` says when
its memory is free. The one exception is a receive that has met no message yet: while
nobody waits for it, it is not posted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, TypeVar

from kvwire.endpoint.request import RequestState

T = TypeVar("T")


class Request(Coroutine[Any, Any, T], Generic[T]):
    """Follows one send, recv, put or get. Await it for its result.

    It is a coroutine object in all but name, so ``asyncio.create_task``, ``gather`` and
    ``TaskGroup`` take it as it is. Unlike a coroutine it has started already, and need
    not be awaited.
    """

    __slots__ = ("_state", "_waits")

    def __init__(self, state: RequestState[T]) -> None:
        self._state = state
        # Of each task that was made of this request, its wait.
        self._waits: dict[asyncio.Task[Any] | None, Generator[Any, Any, T]] | None
        self._waits = None

    def __repr__(self) -> str:
        return repr(self._state)

    def done(self) -> bool:
        """Tell whether the completion is known."""
        return self._state.over

    def result(self) -> T:
        """Return the result, or raise the error.

        Raises:
            asyncio.InvalidStateError: It is not known yet.
            KVWireError: The request failed.
        """
        return self._state.result()

    def cancel(self) -> None:
        """End the request, for both sides; do nothing if it is over.

        Its awaiters get :exc:`~kvwire.RequestCancelled`. The memory is free once
        :meth:`released` returns: what a transport has begun, it finishes.
        """
        self._state.cancel()

    async def released(self) -> None:
        """Wait until nothing of kvwire can touch the request's memory any more.

        That is after the completion, whatever it was. Without deadline: a timeout here
        would mean a guess, and the memory is either free or it is not.

        Cancel safety: safe, it only watches.
        """
        await self._state.released()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._state.wait()

    # --- what asyncio expects of a coroutine object -----------------------------------

    def send(self, value: Any) -> Any:
        """Run the wait of the current task on, as ``asyncio.Task`` does."""
        return self._drive(lambda waiting: waiting.send(value))

    def throw(
        self,
        typ: Any,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> Any:
        """Raise inside the wait of the current task, as its cancellation does."""
        error = typ if val is None else val
        if isinstance(error, type):
            error = error()
        assert isinstance(error, BaseException)
        if asyncio.current_task() not in (self._waits or {}):
            # Cancelled before its first step: this task has never waited.
            self._state.neglect_if_alone()
        raised = error.with_traceback(tb) if tb else error
        return self._drive(lambda waiting: waiting.throw(raised))

    def close(self) -> None:
        """Stop the wait of the current task; the request goes on."""
        if self._waits is None:
            return
        waiting = self._waits.pop(asyncio.current_task(), None)
        if waiting is not None:
            waiting.close()

    def _drive(self, step: Callable[[Generator[Any, Any, T]], Any]) -> Any:
        """Take one step of the current task's own wait for this request."""
        task = asyncio.current_task()
        if self._waits is None:
            self._waits = {}
        waits = self._waits
        waiting = waits.get(task)
        if waiting is None:
            waiting = waits[task] = self._state.wait()
        try:
            return step(waiting)
        except BaseException:  # StopIteration with the result, mostly
            del waits[task]
            raise
