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

import msgspec

from kvwire.aio import LoopThread
from kvwire.backend import Payload
from kvwire.errors import KVWireError
from kvwire.proto.records import RequestRecord

T = TypeVar("T")


class RequestState(msgspec.Struct, Generic[T], eq=False):
    """Holds what a connection and the tasks that wait know of one request.

    Attributes:
        owner: Runs it; None of one that was over at once.
        verb: Posts it in the core, given a buffer and its bytes.
        memory: Its bytes; where those of a receive go, None for new memory.
        deadline: An instant of the loop's clock, or None.
        begun_at: When it was begun, on the monotonic clock.
        over: The completion is known.
        value: The result of one that is over and has not failed.
        error: Why it failed; None while it is not over, and after a success.
        core: The core's record, while the request is posted.
        waiters: Who waits for the completion.
    """

    owner: RequestOwner | None = None
    verb: Callable[..., RequestRecord] | None = None
    memory: Payload | None = None
    deadline: float | None = None
    begun_at: float = 0.0
    over: bool = False
    value: T | None = None
    error: KVWireError | None = None
    core: RequestRecord | None = None
    waiters: tuple[asyncio.Future[None], ...] = ()

    def __repr__(self) -> str:
        if self.over:
            return f"<Request failed: {self.error}>" if self.error else "<Request done>"
        assert self.owner is not None
        age_s = monotonic() - self.begun_at
        return f"<Request {self.owner.describe(self)}, {age_s:.1f} s old>"

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
        return self.value  # type: ignore[return-value]

    def cancel(self) -> None:
        """End the request, for both sides; do nothing if it is over."""
        if self.owner is not None and not self.over:
            self.owner.thread.check("Request.cancel")
            self.owner.cancel_request(self)

    async def released(self) -> None:
        """Wait until nothing of kvwire can touch the request's memory any more.

        Cancel safety: safe, it only watches.
        """
        if self.owner is None:
            return
        self.owner.thread.check("Request.released")
        free = asyncio.Event()
        self.when_released(free.set)
        await free.wait()

    def when_released(self, call: Callable[[], None]) -> None:
        """Call once nothing of kvwire can touch the request's memory any more."""
        if self.owner is None:
            call()
        else:
            self.owner.when_released(self, call)

    def complete(self, result: T | None, error: KVWireError | None) -> None:
        """Record the completion; called once, by the connection."""
        assert not self.over, "a request was completed twice"
        self.over = True
        self.value = result
        self.error = error
        waiters, self.waiters = self.waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def wait(self) -> Generator[Any, Any, T]:
        """Wait for the completion, as ``__await__`` of a request does."""
        if not self.over:
            owner = self.owner
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
                self.waiters += (waiter,)
                try:
                    yield from waiter
                except BaseException:
                    if not self.over:
                        self.waiters = tuple(w for w in self.waiters if w is not waiter)
                        self.neglect_if_alone()
                    raise
        if self.error is not None:
            yield  # one turn of the loop: see kvwire.aio
            raise self.error
        return self.value  # type: ignore[return-value]

    __await__ = wait

    def neglect_if_alone(self) -> None:
        """Take a receive back that has met no message and that nobody waits for."""
        if self.owner is not None and not self.over and not self.waiters:
            self.owner.unpost(self)


class RequestOwner(Protocol):
    """Stands for the connection a request runs on, as the request sees it."""

    @property
    def thread(self) -> LoopThread:
        """Return who may wait for its requests."""

    def describe(self, request: RequestState[Any]) -> str:
        """Return what an unfinished request is, and what it waits for."""

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
