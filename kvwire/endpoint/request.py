"""A request: one data movement, with exactly one completion.

The completion is stored in the request before any waiting task is woken. So it cannot
get lost with a cancelled task, several tasks may await one request, and awaiting it
again gives the same result.

Cancelling an ``await`` stops the waiting, not the data movement: the hardware
continues, and so does the request. ``cancel()`` ends the request, and ``released()``
returns when its memory is free. The one exception is a receive that no message has
matched yet: it is posted only while a task awaits it, so that no message vanishes into
a forgotten buffer. Awaiting it again posts it again. If a request was made on a
:class:`~kvwire.Peer` without a connection, the peer posts the request once it has one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from time import monotonic
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from kvwire.aio import LoopThread, running_loop, unusable
from kvwire.backend import Payload
from kvwire.errors import KVWireError, again, drop_frames
from kvwire.memory.device.ops import Event
from kvwire.proto.records import RequestRecord
from kvwire.proto.state import RequestKind
from kvwire.types import Uncopied

T = TypeVar("T")


@unusable(
    "await the request first, as in `data = await conn.recv(1)`",
    "__bytes__",
    "__buffer__",
    "__getitem__",
    "__len__",
    "__int__",
    result=bytearray,
)
class Request(Uncopied, Coroutine[Any, Any, T], Generic[T]):
    """Represents one running send, recv, put or get. Await it for its result.

    It can be passed wherever asyncio takes a coroutine: ``asyncio.create_task``,
    ``gather``, ``TaskGroup``. Unlike a coroutine, it has already started and need not
    be awaited.
    """

    # The connection or peer that runs it; None if it was complete when the verb
    # returned.
    _owner: RequestOwner | None = None
    _kind: RequestKind = RequestKind.SEND
    # The tag of a message, the grant of a put or get, or the read of a window.
    _what: Any = None
    # Its bytes; for a receive the destination, or None for new memory.
    _memory: Payload | None = None
    # For device memory, if it is posted later: the device's work that was queued when
    # the verb was called.
    _after: Event | None = None
    # An instant on the loop's clock.
    _deadline: float | None = None
    _begun_at: float = 0.0
    _over: bool = False
    _value: T | None = None
    # Why it failed; None until it is complete, and after a success.
    _error: KVWireError | None = None
    # The core's record, while the request is posted.
    _record: RequestRecord | None = None
    # One for each task that waits for the completion.
    _waiters: tuple[asyncio.Future[None], ...] = ()
    # Callbacks for when its memory is free, while it waits for a connection.
    _watchers: tuple[Callable[[], None], ...] = ()
    # The wait of each task that was created from this request.
    _waits: dict[asyncio.Task[Any] | None, Generator[Any, Any, T]] | None = None

    def __init__(
        self,
        owner: RequestOwner,
        kind: RequestKind,
        what: Any,
        memory: Payload | None,
        deadline: float | None,
    ) -> None:
        self._owner = owner
        self._kind = kind
        self._what = what
        self._memory = memory
        self._deadline = deadline
        self._begun_at = monotonic()

    def __repr__(self) -> str:
        if self._over:
            if self._error is None:
                return "<Request done>"
            return f"<Request failed: {self._error}>"
        assert self._owner is not None
        age_s = monotonic() - self._begun_at
        return f"<Request {self._owner._describe(self)}, {age_s:.1f} s old>"

    def done(self) -> bool:
        """Return whether the request is complete: it has a result or an error."""
        return self._over

    def result(self) -> T:
        """Return the result, or raise the error.

        Raises:
            asyncio.InvalidStateError: The request is not complete yet.
            KVWireError: The request failed.
        """
        if not self._over:
            raise asyncio.InvalidStateError("the request is not done")
        if self._error is not None:
            raise again(self._error)
        return self._value  # type: ignore[return-value]

    def cancel(self) -> None:
        """End the request on both sides; does nothing if it is complete.

        Tasks that await it get :exc:`~kvwire.RequestCancelled`. A transport still
        finishes its running operations, so the memory is free only once
        :meth:`released` returns.
        """
        if self._owner is not None and not self._over:
            self._owner._thread.check("Request.cancel")
            self._owner._cancel(self)

    async def released(self) -> None:
        """Wait until kvwire and its transports no longer touch the request's memory.

        That can be later than the completion, even if the request failed. There is no
        deadline, because a timeout could only guess whether the memory is free.

        Cancel safety: safe, it only watches.
        """
        if self._owner is None:
            return
        self._owner._thread.check("Request.released")
        free = asyncio.Event()
        self._owner._when_released(self, free.set)
        await free.wait()

    def __await__(self) -> Generator[Any, Any, T]:
        if not self._over:
            owner = self._owner
            assert owner is not None
            thread = owner._thread
            loop = thread.loop
            if running_loop() is not loop:
                thread.check("await Request")
            if self._record is None:
                owner._post(self)
            # Posting it again may have completed it.
            if not self._over:
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters += (waiter,)
                try:
                    yield from waiter
                except BaseException:
                    if not self._over:
                        self._waiters = tuple(
                            w for w in self._waiters if w is not waiter
                        )
                        self._neglect_if_alone()
                    raise
        if self._error is not None:
            yield  # one turn of the loop: see kvwire.aio
            raise again(self._error)
        return self._value  # type: ignore[return-value]

    # --- what asyncio expects of a coroutine object -----------------------------------

    def send(self, value: Any) -> Any:
        """Advance the current task's wait by one step, as ``asyncio.Task`` does."""
        return self._drive(value, None)

    def throw(
        self,
        typ: Any,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> Any:
        """Raise an exception inside the current task's wait, as a cancellation does."""
        error = typ if val is None else val
        if isinstance(error, type):
            error = error()
        assert isinstance(error, BaseException)
        if asyncio.current_task() not in (self._waits or {}):
            # Cancelled before its first step: this task has never waited.
            self._neglect_if_alone()
        try:
            return self._drive(None, error.with_traceback(tb) if tb else error)
        finally:
            # The error refers to this frame: see kvwire.errors.again.
            del typ, val, error

    def close(self) -> None:
        """Stop the current task's wait; the request itself goes on."""
        if self._waits is None:
            return
        waiting = self._waits.pop(asyncio.current_task(), None)
        if waiting is not None:
            waiting.close()

    def _drive(self, value: Any, error: BaseException | None) -> Any:
        """Take one step of the current task's own wait for this request."""
        task = asyncio.current_task()
        if self._waits is None:
            self._waits = {}
        waits = self._waits
        waiting = waits.get(task)
        if waiting is None:
            waiting = waits[task] = self.__await__()
        try:
            if error is None:
                return waiting.send(value)
            return waiting.throw(error)
        except BaseException:  # usually StopIteration with the result
            del waits[task]
            raise
        finally:
            del error  # it refers to this frame

    # --- for its owner ----------------------------------------------------------------

    def _complete(self, result: T | None, error: KVWireError | None) -> None:
        """Record the completion, and wake every waiter; called once, by the owner."""
        assert not self._over, "a request was completed twice"
        self._over = True
        self._value = result
        self._error = error
        if error is not None:
            drop_frames(error)  # they refer to this request, also those of its cause
        waiters = self._waiters
        self._waiters = ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self._watchers:
            self._watch_memory()

    def _watch_memory(self) -> None:
        """Pass the release callbacks to the owner."""
        watchers = self._watchers
        self._watchers = ()
        assert self._owner is not None
        for call in watchers:
            self._owner._when_released(self, call)

    def _neglect_if_alone(self) -> None:
        """Withdraw a receive without a message if no task awaits it."""
        if self._owner is not None and not self._over and not self._waiters:
            self._owner._withdraw(self)


def when_released(request: Request[Any], call: Callable[[], None]) -> None:
    """Call a function once kvwire no longer touches the request's memory.

    If the memory is free already, the function is called at once. It is for upper
    rooms, which hold many requests; other code awaits :meth:`Request.released`.
    """
    if request._owner is None:
        call()
    else:
        request._owner._when_released(request, call)


class RequestOwner(Protocol):
    """The part of a connection, or a peer, that a request uses."""

    @property
    def _thread(self) -> LoopThread:
        """The loop and thread on which its requests may be awaited."""

    def _describe(self, request: Request[Any]) -> str:
        """Describe an unfinished request, with the reason for its wait."""

    def _cancel(self, request: Request[Any]) -> None:
        """End a request that is not complete."""

    def _post(self, request: Request[Any]) -> Request[Any]:
        """Post a request that is not posted yet, or was withdrawn; return it."""

    def _withdraw(self, request: Request[Any]) -> None:
        """Withdraw a receive without a message; do nothing for other requests."""

    def _when_released(self, request: Request[Any], call: Callable[[], None]) -> None:
        """Call once the request's memory is free."""
