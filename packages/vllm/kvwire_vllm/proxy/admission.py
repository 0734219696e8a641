"""Limits of a proxy: running requests, waiting requests, and retries."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvwire.types import in_bytes
from kvwire_vllm.proxy.limits import (
    PROXY_BODIES_BYTES_MAX,
    PROXY_RETRY_AFTER_S_MAX,
    PROXY_RETRY_MAX,
    PROXY_RETRY_RESERVE,
    PROXY_RETRY_SHARE,
    PROXY_RUNNING_MAX,
    PROXY_WAITING_MAX,
)


class QueueFull(Exception):
    """Reports that the proxy has no room for a request."""

    def __init__(self, why: str, retry_after_s: int) -> None:
        super().__init__(f"{why}; try again in {retry_after_s} s")
        # Whole seconds after which there may be room.
        self.retry_after_s = retry_after_s


class Admission:
    """Limits how many requests run and how many wait; they run in order of arrival."""

    def __init__(
        self,
        running_max: int = PROXY_RUNNING_MAX,
        waiting_max: int = PROXY_WAITING_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running_max = running_max
        self._waiting_max = waiting_max
        self._clock = clock
        self._turns = asyncio.Semaphore(running_max)
        self._here = 0
        self._held = 0
        self._mean_s = 1.0
        self.running: int = 0  # running requests
        self.waiting: int = 0  # waiting requests
        self.rejected: int = 0  # requests refused so far

    @contextmanager
    def place(self) -> Iterator[Callable[[int], None]]:
        """Reserve a place for a request while it is read, waits or runs.

        The yielded function reserves memory: each call adds that many bytes to the
        request.

        Raises:
            QueueFull: There is no free place, or no room for the bytes.
        """
        if self._here >= self._running_max + self._waiting_max:
            raise self._full(f"{self.waiting} requests wait")
        held = 0

        def take(nbytes: int) -> None:
            nonlocal held
            if self._held + nbytes > PROXY_BODIES_BYTES_MAX:
                raise self._full(
                    f"requests of {in_bytes(self._held)} are being handled"
                )
            self._held += nbytes
            held += nbytes

        self._here += 1
        try:
            yield take
        finally:
            self._here -= 1
            self._held -= held

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn to run, and keep it until the block ends.

        Cancel safety: safe, a request that stops waiting gets no turn.
        """
        if self._turns.locked() and self.waiting >= self._waiting_max:
            raise self._full(f"{self.waiting} requests wait")
        self.waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        began = self._clock()
        try:
            yield
        finally:
            self.running -= 1
            self._mean_s += (self._clock() - began - self._mean_s) / 8
            self._turns.release()

    def _full(self, why: str) -> QueueFull:
        self.rejected += 1
        return QueueFull(why, self._room_in_s())

    def _room_in_s(self) -> int:
        """Estimate the seconds until all waiting requests have had a turn."""
        s = self._mean_s * (self.waiting + 1) / self._running_max
        return max(1, min(math.ceil(s), PROXY_RETRY_AFTER_S_MAX))


class RetryBudget:
    """Limits retries to a share of all requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = PROXY_RETRY_RESERVE
        self._at = clock()
        self.spent: int = 0  # retries so far
        self.refused: int = 0  # retries refused so far

    def deposit(self) -> None:
        """Add the share that one request earns."""
        self._left = min(PROXY_RETRY_MAX, self._left + PROXY_RETRY_SHARE)

    def spend(self) -> bool:
        """Return whether a retry is allowed, and charge it to the budget."""
        now = self._clock()
        if self._left < PROXY_RETRY_RESERVE:
            self._left = min(PROXY_RETRY_RESERVE, self._left + now - self._at)
        self._at = now
        if self._left < 1:
            self.refused += 1
            return False
        self._left -= 1
        self.spent += 1
        return True
