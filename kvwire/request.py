"""A request as its owner sees it: one movement of bytes, with exactly one completion.

The completion is a record in the request, written before anybody is woken. So it cannot
get lost with a cancelled task, several tasks may await one request, and awaiting it
again gives the same answer.

Cancelling an ``await`` stops the waiting and not the movement: the hardware goes on,
and so does the request. ``cancel()`` ends the request, and ``released()`` says when
its memory is free. The one exception is a receive that has met no message yet: while
nobody waits for it, it is not posted, so a message can never vanish into a forgotten
buffer. Awaiting it again posts it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kvwire.backend import Payload
from kvwire.errors import KVWireError

if TYPE_CHECKING:
    from kvwire.proto.requests import RequestRecord

T = TypeVar("T")


class Request(Coroutine[Any, Any, T], Generic[T]):
    """One send, recv, put or get under way. Await it for its result.

    It is a coroutine object in all but name, so ``asyncio.create_task``, ``gather`` and
    ``TaskGroup`` take it as it is. Unlike a coroutine it has started already, and need
    not be awaited.
    """

    __slots__ = (
        "_drivers",
        "_error",
        "_owner",
        "_result",
        "_waiters",
        "core",
        "into",
        "over",
        "post",
    )

    def __init__(
        self,
        owner: RequestOwner | None = None,
        *,
        into: Payload | None = None,
        post: Callable[[], RequestRecord] | None = None,
    ) -> None:
        self.over = False
        self.core: RequestRecord | None = None
        # Of a receive: where its bytes go, and how to post it (again).
        self.into = into
        self.post = post
        self._owner = owner
        self._result: T | None = None
        self._error: KVWireError | None = None
        self._waiters: tuple[asyncio.Future[None], ...] = ()
        # Of each task that was made of this request, its wait.
        self._drivers: dict[asyncio.Task[Any] | None, Generator[Any, Any, T]] | None
        self._drivers = None

    @classmethod
    def completed(cls, result: T) -> Request[T]:
        """A request that was over at once.

        Cancel safety: nothing is left that could be cancelled.
        """
        request = cls()
        request.over = True
        request._result = result
        return request

    @classmethod
    def failed(cls, error: KVWireError) -> Request[T]:
        """A request that failed at once.

        Cancel safety: nothing is left that could be cancelled.
        """
        request = cls()
        request.over = True
        request._error = error
        return request

    def __repr__(self) -> str:
        state = "pending"
        if self.over:
            state = f"failed: {self._error}" if self._error else "done"
        return f"<Request {state}>"

    def done(self) -> bool:
        """Whether the completion is known."""
        return self.over

    def result(self) -> T:
        """The result, or the error raised.

        Raises:
            asyncio.InvalidStateError: It is not known yet.
            KVWireError: The request failed.
        """
        if not self.over:
            raise asyncio.InvalidStateError("the request is not done")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def cancel(self) -> None:
        """End the request, for both sides; does nothing if it is over.

        Its awaiters get :exc:`~kvwire.RequestCancelled`. The memory is free once
        :meth:`released` returns: what a transport has begun, it finishes.
        """
        if self._owner is not None and not self.over:
            self._owner.cancel_request(self)

    async def released(self) -> None:
        """Wait until nothing of kvwire can touch the request's memory any more.

        That is after the completion, whatever it was. Without deadline: a timeout here
        would mean a guess, and the memory is either free or it is not.

        Cancel safety: safe, it only watches.
        """
        if self._owner is None:
            return
        free = asyncio.Event()
        self._owner.when_released(self, free.set)
        await free.wait()

    def complete(self, result: T | None, error: KVWireError | None) -> None:
        """Record the completion; called once, by the connection."""
        assert not self.over, "a request was completed twice"
        self.over = True
        self._result = result
        self._error = error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters = ()

    def __await__(self) -> Generator[Any, Any, T]:
        if not self.over:
            owner = self._owner
            assert owner is not None
            if self.core is None:
                owner.post_again(self)
            # Posting it again may have completed it.
            if not self.over:
                loop = asyncio.get_running_loop()
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters += (waiter,)
                try:
                    yield from waiter
                except BaseException:
                    self._stop_waiting(waiter, owner)
                    raise
        if self._error is not None:
            yield  # one turn of the loop: see kvwire.clock
            raise self._error
        return self._result  # type: ignore[return-value]

    # --- what asyncio expects of a coroutine object -----------------------------------

    def send(self, value: Any) -> Any:
        """Run the coroutine on, as ``asyncio.Task`` does."""
        return self._drive(lambda waiting: waiting.send(value))

    def throw(
        self,
        typ: Any,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> Any:
        """Raise inside the coroutine, as a cancelled ``asyncio.Task`` does."""
        error = typ if val is None else val
        if isinstance(error, type):
            error = error()
        assert isinstance(error, BaseException)
        drivers = self._drivers or {}
        if self._owner is not None and asyncio.current_task() not in drivers:
            # Cancelled before its first step: this task has never waited.
            self._neglect_if_alone(self._owner)
        raised = error.with_traceback(tb) if tb else error
        return self._drive(lambda waiting: waiting.throw(raised))

    def close(self) -> None:
        """Stop waiting; the request goes on."""
        if self._drivers is None:
            return
        waiting = self._drivers.pop(asyncio.current_task(), None)
        if waiting is not None:
            waiting.close()

    def _drive(self, step: Callable[[Generator[Any, Any, T]], Any]) -> Any:
        """Take one step of the current task's own wait for this request."""
        task = asyncio.current_task()
        if self._drivers is None:
            self._drivers = {}
        drivers = self._drivers
        waiting = drivers.get(task)
        if waiting is None:
            waiting = drivers[task] = self.__await__()
        try:
            return step(waiting)
        except BaseException:  # StopIteration with the result, mostly
            del drivers[task]
            raise

    def _stop_waiting(self, waiter: asyncio.Future[None], owner: RequestOwner) -> None:
        if not self.over:
            self._waiters = tuple(w for w in self._waiters if w is not waiter)
            self._neglect_if_alone(owner)

    def _neglect_if_alone(self, owner: RequestOwner) -> None:
        if not self.over and not self._waiters:
            owner.neglect(self)


class RequestOwner(Protocol):
    """The connection a request runs on, as the request sees it."""

    def cancel_request(self, request: Request[Any]) -> None:
        """End it."""

    def post_again(self, request: Request[Any]) -> None:
        """Somebody waits again for a receive that was neglected."""

    def neglect(self, request: Request[Any]) -> None:
        """Nobody waits for it any more: take it back if it has met no message."""

    def when_released(self, request: Request[Any], call: Callable[[], None]) -> None:
        """Call once its memory is free."""
