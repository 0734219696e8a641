"""Interrupts a coroutine at a suspension of one's choice."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Generator
from typing import Any


class How(enum.Enum):
    """What happens at the suspension."""

    CANCEL = "cancel"
    LATE = "cancel once what is awaited is there"
    TWICE = "cancel, and cancel the clean-up as well"
    TIMEOUT = "a timeout"


class Interrupted:
    """Awaits something, and interrupts it when it suspends for the n-th time."""

    def __init__(
        self,
        awaited: Awaitable[Any],
        at: int,
        how: How,
        *,
        also: Callable[[], None] | None = None,
    ) -> None:
        self.hit = False
        self._awaited = awaited
        self._at = at
        self._how = how
        self._also = also
        self._timeout: asyncio.Timeout | None = None

    async def run(self) -> None:
        """Await it."""
        if self._how is not How.TIMEOUT:
            await self
            return
        async with asyncio.timeout(None) as self._timeout:
            await self

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._awaited.__await__()
        count, error = 0, None
        while True:
            try:
                yielded = inner.send(None) if error is None else inner.throw(error)
            except StopIteration as stop:
                return stop.value
            if count == self._at or (self.hit and self._how is How.TWICE):
                self._interrupt(yielded)
            count += 1
            error = None
            try:
                yield yielded
            except BaseException as exc:  # noqa: BLE001 - thrown on into the coroutine
                error = exc

    def _interrupt(self, yielded: Any) -> None:
        self.hit = True
        task = asyncio.current_task()
        assert task is not None
        if self._also is not None:
            self._also()
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())
        elif self._how is How.LATE and asyncio.isfuture(yielded):
            yielded.add_done_callback(lambda _: task.cancel())
        else:
            task.cancel()
