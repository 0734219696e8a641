"""The state of a request: one movement of bytes, with exactly one completion.

The completion is a record in the state, written before anybody is woken. So it cannot
get lost with a cancelled task, several tasks may await one request, and awaiting it
again gives the same answer.

A receive that has met no message is posted only while somebody waits for it, so that a
message can never vanish into a forgotten buffer. Awaiting it again posts it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from threading import get_ident
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from kvwire.backend import Payload
from kvwire.driver.loop_thread import LoopThread
from kvwire.errors import KVWireError
from kvwire.proto.requests import RequestRecord

T = TypeVar("T")


class RequestState(Generic[T]):
    """Holds what a connection and the tasks that wait know of one request.

    Attributes:
        over: The completion is known.
        begun_at: When it was begun, on the monotonic clock.
        error: Why it failed; None while it is not over, and after a success.
        core: The core's record, while the request is posted.
        into: Where the bytes of a receive go.
        post: Posts the request in the core, or posts it again.
    """

    # Defaults, so that a request that is over at once sets two attributes and no more.
    over: bool = False
    begun_at: float = 0.0
    error: KVWireError | None = None
    core: RequestRecord | None = None
    into: Payload | None = None
    post: Callable[[], RequestRecord] | None = None
    _owner: RequestOwner | None = None
    _result: T | None = None
    _waiters: tuple[asyncio.Future[None], ...] = ()

    @classmethod
    def begun(
        cls,
        owner: RequestOwner,
        post: Callable[[], RequestRecord],
        into: Payload | None = None,
    ) -> RequestState[T]:
        """Make the state of a request that its owner is about to post."""
        request = cls()
        request._owner = owner
        request.begun_at = monotonic()
        request.post = post
        request.into = into
        return request

    @classmethod
    def completed(cls, result: T) -> RequestState[T]:
        """Make the state of a request that was over at once."""
        request = cls()
        request.over = True
        request._result = result
        return request

    @classmethod
    def failed(cls, error: KVWireError) -> RequestState[T]:
        """Make the state of a request that failed at once."""
        request = cls()
        request.over = True
        request.error = error
        return request

    def __repr__(self) -> str:
        if self.over:
            return f"<Request failed: {self.error}>" if self.error else "<Request done>"
        assert self._owner is not None
        age_s = monotonic() - self.begun_at
        return f"<Request {self._owner.describe(self)}, {age_s:.1f} s old>"

    def result(self) -> T:
        """Return the result, or raise the error.

        Raises:
            asyncio.InvalidStateError: It is not known yet.
            KVWireError: The request failed.
        """
        if not self.over:
            raise asyncio.InvalidStateError("the request is not done")
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]

    def cancel(self) -> None:
        """End the request, for both sides; do nothing if it is over."""
        if self._owner is not None and not self.over:
            self._owner.thread.check("Request.cancel")
            self._owner.cancel_request(self)

    async def released(self) -> None:
        """Wait until nothing of kvwire can touch the request's memory any more.

        Cancel safety: safe, it only watches.
        """
        if self._owner is None:
            return
        self._owner.thread.check("Request.released")
        free = asyncio.Event()
        self.when_released(free.set)
        await free.wait()

    def when_released(self, call: Callable[[], None]) -> None:
        """Call once nothing of kvwire can touch the request's memory any more."""
        if self._owner is None:
            call()
        else:
            self._owner.when_released(self, call)

    def complete(self, result: T | None, error: KVWireError | None) -> None:
        """Record the completion; called once, by the connection."""
        assert not self.over, "a request was completed twice"
        self.over = True
        self._result = result
        self.error = error
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def wait(self) -> Generator[Any, Any, T]:
        """Wait for the completion, as ``__await__`` of a request does."""
        if not self.over:
            owner = self._owner
            assert owner is not None
            thread = owner.thread
            loop = thread.loop
            # Not by asking which loop runs: Python 3.11 then asks for the process too.
            if get_ident() != thread.ident or not loop.is_running():
                thread.check("await Request")
            if self.core is None:
                owner.repost(self)
            # Posting it again may have completed it.
            if not self.over:
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters += (waiter,)
                try:
                    yield from waiter
                except BaseException:
                    if not self.over:
                        self._waiters = tuple(
                            w for w in self._waiters if w is not waiter
                        )
                        self.neglect_if_alone()
                    raise
        if self.error is not None:
            yield  # one turn of the loop: see kvwire.clock
            raise self.error
        return self._result  # type: ignore[return-value]

    __await__ = wait

    def neglect_if_alone(self) -> None:
        """Take a receive back that has met no message and that nobody waits for."""
        if self._owner is not None and not self.over and not self._waiters:
            self._owner.unpost(self)


class RequestOwner(Protocol):
    """Stands for the connection a request runs on, as the request sees it."""

    @property
    def thread(self) -> LoopThread:
        """Return who may wait for its requests."""

    def describe(self, request: RequestState[Any]) -> str:
        """Say of a request that is not over what it is, and what it waits for."""

    def cancel_request(self, request: RequestState[Any]) -> None:
        """End it."""

    def repost(self, request: RequestState[Any]) -> None:
        """Post a receive that was taken back, since somebody waits for it again."""

    def unpost(self, request: RequestState[Any]) -> None:
        """Take a request back if it has met no message: nobody waits for it."""

    def when_released(
        self, request: RequestState[Any], call: Callable[[], None]
    ) -> None:
        """Call once its memory is free."""
