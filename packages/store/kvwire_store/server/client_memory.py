"""A bound on the memory that all clients of a store server hold together.

A client that reads no answers holds its requests, the answers and its berths until
their deadlines. For one client that is little, but for a few hundred it is all of a
machine's memory. So one limit applies to all clients together. When it is reached, the
client that has not read anything for the longest time is disconnected; clients that
read continue.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvwire.types import in_bytes
from kvwire_store.limits import STORE_BERTHS_BYTES, STORE_HELD_BYTES, STORE_TIMEOUT_S

Berth = npt.NDArray[np.uint8]


class MemoryHolder(Protocol):
    """A client that holds some of the server's memory."""

    @property
    def stalled_since(self) -> float:
        """Return when its oldest unread answer was sent; infinity if all are read."""

    def drop(self, reason: str) -> None:
        """End its connection."""


class ClientMemory:
    """Counts the memory of all clients of a server. One event loop.

    Attributes:
        berth_bytes: Bytes of a berth.
        held_bytes_max: The most bytes that clients hold together.
        held_bytes: Bytes of open requests, and of answers that clients have not read.
    """

    def __init__(
        self,
        berth_bytes: int,
        *,
        held_bytes_max: int = STORE_HELD_BYTES,
        berths_bytes: int = STORE_BERTHS_BYTES,
        timeout_s: float = STORE_TIMEOUT_S,
    ) -> None:
        self.berth_bytes = berth_bytes
        self.held_bytes_max = held_bytes_max
        self._timeout_s = timeout_s
        self.held_bytes: int = 0
        self._held: dict[MemoryHolder, int] = {}
        # Clients that are being disconnected and still hold memory.
        self._leaving: set[MemoryHolder] = set()
        self._leaving_bytes = 0
        self._has_room = asyncio.Event()
        self._room = asyncio.Semaphore(max(1, berths_bytes // berth_bytes))
        self._used: list[Berth] = []
        # The holder of each berth, and since when; the longest first.
        self._lent: dict[object, tuple[float, MemoryHolder]] = {}

    def hold(self, client: MemoryHolder, nbytes: int) -> None:
        """Count memory that a client holds; over the limit, drop the slowest client."""
        self.held_bytes += nbytes
        self._held[client] = self._held.get(client, 0) + nbytes
        if client in self._leaving:
            self._leaving_bytes += nbytes
        if self.held_bytes - self._leaving_bytes > self.held_bytes_max:
            staying = (one for one in self._held if one not in self._leaving)
            slowest = min(staying, key=lambda one: one.stalled_since, default=client)
            if slowest.stalled_since < math.inf:
                self._leaving.add(slowest)
                self._leaving_bytes += self._held[slowest]
                most = in_bytes(self.held_bytes_max)
                slowest.drop(
                    f"all clients together hold more than {most} of requests and "
                    f"answers, and it has read nothing for the longest time"
                )

    def release(self, client: MemoryHolder, nbytes: int) -> None:
        """Count memory as free again."""
        self.held_bytes -= nbytes
        self._held[client] -= nbytes
        if client in self._leaving:
            self._leaving_bytes -= nbytes
        if self.held_bytes <= self.held_bytes_max:
            self._has_room.set()

    def forget(self, client: MemoryHolder) -> None:
        """Forget a client, and release the memory that it still holds."""
        if client in self._held:
            self.release(client, self._held[client])
            del self._held[client]
        self._leaving.discard(client)

    @property
    def has_room(self) -> bool:
        """Whether all clients together hold no more than the limit."""
        return self.held_bytes <= self.held_bytes_max

    async def room(self) -> None:
        """Wait until all clients together hold no more than the limit.

        Cancel safety: safe, it only watches.
        """
        while not self.has_room:
            self._has_room.clear()
            await self._has_room.wait()

    @asynccontextmanager
    async def berth(self, client: MemoryHolder) -> AsyncIterator[Berth]:
        """Lend a berth for a block of code; at its end nothing may touch the berth.

        Cancel safety: safe while it waits. If the block is cancelled, something may
        still touch the berth, so it is not reused; another one replaces it.
        """
        await self._wait_for_room()
        lent = object()
        try:
            self._lent[lent] = asyncio.get_running_loop().time(), client
            berth = (
                self._used.pop() if self._used else np.empty(self.berth_bytes, np.uint8)
            )
            yield berth
            # Not after an exception: something may still touch the berth then.
            self._used.append(berth)
        finally:
            self._lent.pop(lent, None)
            self._room.release()

    async def _wait_for_room(self) -> None:
        """Wait for a berth; disconnect clients that hold one for too long."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def look() -> float:
            """Disconnect a client that is too slow; return when to check again."""
            for lent, (since, client) in list(self._lent.items()):
                if since + self._timeout_s > loop.time():
                    return since + self._timeout_s
                del self._lent[lent]
                client.drop(
                    f"it moves one transfer for more than {self._timeout_s:g} s while "
                    f"others wait for the memory"
                )
            return loop.time() + self._timeout_s

        def again() -> None:
            nonlocal timer
            timer = loop.call_at(look(), again)

        if self._room.locked():
            again()
        try:
            await self._room.acquire()
        finally:
            if timer is not None:
                timer.cancel()
