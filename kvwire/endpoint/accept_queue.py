"""Inbound connections that nobody has taken yet, and calls that wait for one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import TypeVar

from kvwire.errors import ClosedOK

T = TypeVar("T")


class AcceptQueue(AsyncIterator[T]):
    """Iterate it for the connections, in the order in which they came.

    Any number of tasks may iterate at once, and each connection goes to one of them. A
    connection that has ended meanwhile is handed out too, since what its peer sent
    before it closed can still be received.
    """

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def __len__(self) -> int:
        """Connections that nobody has taken."""
        return len(self._waiting)

    def put(self, connection: T) -> None:
        """Hand a connection to the next caller that waits."""
        self._waiting.append(connection)  # bounded: CONNECTIONS_MAX, by the caller
        self._changed.set()

    def close(self) -> None:
        """End every iteration; connections that nobody has taken are forgotten."""
        self._closed = True
        self._waiting.clear()
        self._changed.set()

    async def take(self) -> T:
        """Wait for the next connection.

        Cancel safety: safe, no connection is lost.
        """
        while not self._waiting:
            if self._closed:
                raise ClosedOK("the communicator is closed")
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()

    async def __anext__(self) -> T:
        try:
            return await self.take()
        except ClosedOK:
            raise StopAsyncIteration from None
