"""A request to a peer that is not connected yet: it runs when a connection is there.

Its caller holds the *outer* request from the first moment on. Once there is a
connection the *inner* one runs on it, and what becomes of that becomes of the outer.
A receive that nobody waits for does not wait here either, as on a connection.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator
from time import monotonic
from typing import Any, Final

from kvwire.aio import LoopThread, start_task
from kvwire.endpoint.connection import ConnectionState
from kvwire.endpoint.request import RequestState
from kvwire.errors import DeadlineExceeded, KVWireError, RequestCancelled


class DeferredRequest:
    """Owns an outer request until its inner one is over.

    Args:
        waits_for: Says to whom there is no connection, and why.
        deadline: An instant of the loop's clock, or None.
        receives: Whether it is taken back while nobody waits for it.

    Attributes:
        outer: What the caller holds.
        task: Waits for the connection, then for the inner request; None while neither
            is waited for.
    """

    def __init__(
        self,
        thread: LoopThread,
        connect: Callable[[], Awaitable[ConnectionState]],
        call: Callable[[ConnectionState], RequestState[Any]],
        *,
        waits_for: Callable[[], str],
        deadline: float | None,
        receives: bool,
    ) -> None:
        self.thread: LoopThread = thread
        self._connect: Final = connect
        self._call: Final = call
        self._waits_for: Final = waits_for
        self._deadline: Final = deadline
        self._receives: Final = receives
        self._inner: RequestState[Any] | None = None
        # What waits for the memory of an inner request that is not there yet.
        self._watchers: tuple[Callable[[], None], ...] = ()
        self.outer: RequestState[Any] = RequestState(owner=self, begun_at=monotonic())
        self.task: asyncio.Task[None] | None = None
        self.repost(self.outer)

    def describe(self, request: RequestState[Any]) -> str:
        """Serve a request, as RequestOwner says."""
        if self._inner is not None and not self._inner.over:
            return f"in {self._inner!r}"
        return f"waits for a connection to {self._waits_for()}"

    def cancel_request(self, request: RequestState[Any]) -> None:
        """Serve a request, as RequestOwner says."""
        if self._inner is not None:
            self._inner.cancel()
        if self._inner is None or self.task is None:
            self._stop()
            self._complete(None, RequestCancelled("it was cancelled on this side"))

    def repost(self, request: RequestState[Any]) -> None:
        """Serve a request, as RequestOwner says."""
        if self.task is None:
            self.task = start_task(self._run())

    def unpost(self, request: RequestState[Any]) -> None:
        """Serve a request, as RequestOwner says."""
        if self._receives:
            # Whatever the inner one has received by now, it keeps.
            self._stop()

    def when_released(
        self, request: RequestState[Any], call: Callable[[], None]
    ) -> None:
        """Serve a request, as RequestOwner says."""
        if self._inner is not None:
            self._inner.when_released(call)
        elif request.over:
            call()
        else:
            self._watchers += (call,)

    def _stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            self.task = None

    async def _run(self) -> None:
        try:
            result = await self._result()
        except KVWireError as exc:
            self._complete(None, exc)
        except Exception as exc:  # noqa: BLE001 - the caller waits, and is told
            error = KVWireError(f"the request to a peer failed: {exc!r}")
            error.__cause__ = exc
            self._complete(None, error)
        else:
            self._complete(result, None)

    async def _result(self) -> Any:
        if self._inner is None:
            try:
                async with asyncio.timeout_at(self._deadline) as limit:
                    connection = await self._connect()
            except TimeoutError:
                if not limit.expired():
                    raise
                raise DeadlineExceeded(
                    f"no connection in time to {self._waits_for()}"
                ) from None
            self._inner = self._call(connection)
            self._watch_inner()
        return await _over(self._inner)

    def _watch_inner(self) -> None:
        watchers, self._watchers = self._watchers, ()
        for call in watchers:
            self.when_released(self.outer, call)

    def _complete(self, result: Any, error: KVWireError | None) -> None:
        self.outer.complete(result, error)
        self._watch_inner()


@types.coroutine
def _over(request: RequestState[Any]) -> Generator[Any, Any, Any]:
    """Wait for a request, as ``await`` does."""
    return (yield from request.wait())
